"""Faults that a test must notice: the slips that paged attention invites, each as one replacement in the source.

Owns the list; mutation_check.py plants them. Every text stands once in its file, so a change of the source that moves
one has to move it here too.
"""

from dataclasses import dataclass

ATTENTION = "kernels/attention/triton_kernels.py"
PLANNER = "kernels/attention/planner.py"
WRITE = "kernels/attention/triton_write.py"
OPS = "kernels/model_ops/triton_kernels.py"
SAMPLER = "kernels/sampling/triton_sampler.py"

ATTENTION_TESTS = "tests/kernels/test_attention.py"
TRITON_ATTENTION_TESTS = "tests/kernels/test_triton_attention.py"
BATCH_TESTS = (f"{ATTENTION_TESTS}::test_batches",)
WINDOW_TESTS = (f"{ATTENTION_TESTS}::test_sliding_window",)
TILE_TESTS = (f"{TRITON_ATTENTION_TESTS}::test_tiles",)  # tiles smaller than the window
WINDOW_HYGIENE_TESTS = (f"{ATTENTION_TESTS}::test_blocks_before_the_window_are_not_read",)
SHAPE_TESTS = (f"{ATTENTION_TESTS}::test_shapes",)
SOFT_CAP_TESTS = (f"{ATTENTION_TESTS}::test_soft_cap",)
QUANTISED_TESTS = (f"{ATTENTION_TESTS}::test_quantised_cache",)
OFFSET_TESTS = (f"{TRITON_ATTENTION_TESTS}::test_offsets_past_two_to_the_31",)
SPLIT_TESTS = (f"{TRITON_ATTENTION_TESTS}::test_a_last_split_of_one_key",)
INVARIANCE_TESTS = (f"{TRITON_ATTENTION_TESTS}::test_batch_invariance",)
GRAPH_TESTS = (f"{TRITON_ATTENTION_TESTS}::test_graph_lists",)
WRITE_TESTS = ("tests/kernels/test_triton_write.py",)
OPS_TESTS = ("tests/kernels/test_triton_ops.py",)
SAMPLER_TESTS = ("tests/kernels/test_triton_sampler.py",)


@dataclass(frozen=True, slots=True)
class Mutation:
    """One fault: what becomes what, and who should notice."""

    name: str
    kernel: str  # the kernel, or the part of the host's code, that it breaks
    file: str
    old: str  # stands once in the file
    new: str
    tests: tuple[str, ...]  # files, or tests, as pytest names them
    is_quick: bool = False  # checked in every run of the suite, not only by `make kernels`


MUTATIONS = (
    Mutation(
        "a token does not see itself",
        "attend_kernel",
        ATTENTION,
        "is_key[None, :] & (key[None, :] <= row_position[:, None])",
        "is_key[None, :] & (key[None, :] < row_position[:, None])",
        BATCH_TESTS,
        is_quick=True,
    ),
    Mutation(
        "the window is one key too long",
        "attend_kernel",
        ATTENTION,
        "visible & (key[None, :] > row_position[:, None] - SLIDING_WINDOW)",
        "visible & (key[None, :] >= row_position[:, None] - SLIDING_WINDOW)",
        WINDOW_TESTS,
    ),
    Mutation(
        "tiles run unmasked before all rows see them",
        "attend_kernel",
        ATTENTION,
        "last_window = position + num_tokens - SLIDING_WINDOW",
        "last_window = position + 1 - SLIDING_WINDOW",
        TILE_TESTS,
    ),
    Mutation(
        "the unmasked tiles go one tile too far",
        "attend_kernel",
        ATTENTION,
        "full_end = tl.maximum(tl.minimum(end, position + 1), begin) // KEYS * KEYS",
        "full_end = (tl.maximum(tl.minimum(end, position + 1), begin) + KEYS - 1) // KEYS * KEYS",
        BATCH_TESTS,
    ),
    Mutation(
        "slots past the last key are read",
        "attend_kernel",
        ATTENTION,
        "is_key = (key >= first_key) & (key < key_end)",
        "is_key = key >= first_key",
        BATCH_TESTS,
    ),
    Mutation(
        "blocks before the window are read",
        "attend_kernel",
        ATTENTION,
        "is_key = (key >= first_key) & (key < key_end)",
        "is_key = key < key_end",
        WINDOW_HYGIENE_TESTS,
    ),
    Mutation(
        "a key's slot is not taken within its block",
        "attend_kernel",
        ATTENTION,
        "slot = key % BLOCK_SIZE",
        "slot = key % KEYS",
        BATCH_TESTS,
    ),
    Mutation(
        "a tile in the middle of a block reads its beginning",
        "attend_kernel",
        ATTENTION,
        "slot = tile_begin % BLOCK_SIZE + tl.arange(0, KEYS)",
        "slot = tl.arange(0, KEYS)",
        SHAPE_TESTS,
    ),
    Mutation(
        "key offsets are 32 bits wide",
        "attend_kernel",
        ATTENTION,
        "key_offset = block * key_block_stride",
        "key_offset = block.to(tl.int32) * key_block_stride",
        OFFSET_TESTS,
    ),
    Mutation(
        "value offsets are 32 bits wide",
        "attend_kernel",
        ATTENTION,
        "value_offset = block * value_block_stride",
        "value_offset = block.to(tl.int32) * value_block_stride",
        OFFSET_TESTS,
    ),
    Mutation(
        "rows take their heads in another order",
        "attend_kernel",
        ATTENTION,
        "head = kv_head * GROUP_SIZE + tile_row % GROUP_SIZE",
        "head = kv_head * GROUP_SIZE + tile_row // (QUERY_ROWS // GROUP_SIZE) % GROUP_SIZE",
        BATCH_TESTS,
    ),
    Mutation(
        "old values do not decay",
        "attend_kernel",
        ATTENTION,
        "v.to(q.dtype), acc * decay[:, None], input_precision",
        "v.to(q.dtype), acc, input_precision",
        BATCH_TESTS,
    ),
    Mutation(
        "old weights do not decay",
        "attend_kernel",
        ATTENTION,
        "l = l * decay + tl.sum(weights, 1)",
        "l = l + tl.sum(weights, 1)",
        BATCH_TESTS,
    ),
    Mutation(
        "a row that has seen nothing gives NaN",
        "attend_kernel",
        ATTENTION,
        'tl.where(m == float("-inf"), 0.0, m)',
        "m",
        WINDOW_TESTS,
    ),
    Mutation(
        "the scales of keys are dropped",
        "attend_kernel",
        ATTENTION,
        "(key_scale * score_scale)[None, :]",
        "score_scale",
        QUANTISED_TESTS,
    ),
    Mutation(
        "the scales of values are dropped",
        "attend_kernel",
        ATTENTION,
        "weights = weights * value_scale[None, :]",
        "weights = weights * (value_scale * 0.0 + 1.0)[None, :]",
        QUANTISED_TESTS,
    ),
    Mutation(
        "scales are read at another head",
        "attend_kernel",
        ATTENTION,
        "value_scale_head = value_scale + kv_head.to(tl.int64) * scale_head_stride",
        "value_scale_head = value_scale",
        QUANTISED_TESTS,
    ),
    Mutation(
        "the soft cap is not in base 2",
        "attend_kernel",
        ATTENTION,
        "(SOFTCAP * LOG2E) * tanh(scores)",
        "SOFTCAP * tanh(scores)",
        SOFT_CAP_TESTS,
    ),
    Mutation(
        "items past the end of the list run",
        "attend_kernel",
        ATTENTION,
        "if item_index >= tl.load(num_items):",
        "if item_index >= tl.load(num_items) + 1:",
        GRAPH_TESTS,
    ),
    Mutation(
        "segments begin where a split does",
        "attend_kernel",
        ATTENTION,
        "tl.range(key_begin // SEGMENT_KEYS * SEGMENT_KEYS, key_end, SEGMENT_KEYS)",
        "tl.range(key_begin, key_end, SEGMENT_KEYS)",
        INVARIANCE_TESTS,
    ),
    Mutation(
        "merged weights are not rescaled",
        "merge_kernel",
        ATTENTION,
        "l = tl.fma(l, decay, later_l * later_decay)",
        "l = l + later_l * later_decay",
        BATCH_TESTS,
        is_quick=True,
    ),
    Mutation(
        "merged values are not rescaled",
        "merge_kernel",
        ATTENTION,
        "acc = tl.fma(acc, decay[:, None], later_acc * later_decay[:, None])",
        "acc = acc + later_acc * later_decay[:, None]",
        BATCH_TESTS,
    ),
    Mutation(
        "one split too many is merged",
        "merge_kernel",
        ATTENTION,
        "tl.where(first + i < num_splits, NUM_Q_HEADS, 0)",
        "tl.where(first + i <= num_splits, NUM_Q_HEADS, 0)",
        SPLIT_TESTS,
    ),
    Mutation(
        "splits are merged last to first",
        "merge_kernel",
        ATTENTION,
        "slot_head = (first_slot + (first + i) * slot_stride)",
        "slot_head = (first_slot + (num_splits - 1 - first - i) * slot_stride)",
        INVARIANCE_TESTS,
    ),
    Mutation(
        "merges past the end of the list run",
        "merge_kernel",
        ATTENTION,
        "if tl.program_id(0) >= tl.load(num_merges):",
        "if tl.program_id(0) >= tl.load(num_merges) + 1:",
        GRAPH_TESTS,
    ),
    Mutation(
        "a split drops its last key",
        "planner",
        PLANNER,
        "items[:, 5] = np.minimum(cut + cuts.step[owner], tiles.key_end[owner])",
        "items[:, 5] = np.minimum(cut + cuts.step[owner] - (split + 1 < num_splits[owner]), tiles.key_end[owner])",
        BATCH_TESTS,
        is_quick=True,
    ),
    Mutation(
        "the window begins with the last token of a tile",
        "planner",
        PLANNER,
        "first_key = np.maximum(0, position + 1 - settings.sliding_window)",
        "first_key = np.maximum(0, position + num_tokens - settings.sliding_window)",
        WINDOW_TESTS,
    ),
    Mutation(
        "a merge reads its neighbour's splits",
        "planner",
        PLANNER,
        "merges[:, 3] = tiles.num_tokens[tile]",
        "merges[:, 3] = 1",
        BATCH_TESTS,
    ),
    Mutation(
        "heads turn the other way",
        "rotate_and_write_kernel",
        WRITE,
        "turned = first * token_cos - second * token_sin",
        "turned = first * token_cos + second * token_sin",
        ("tests/kernels/test_triton_write.py::test_nothing_to_write_still_gives_queries",),
        is_quick=True,
    ),
    Mutation(
        "the norm of a head forgets eps",
        "rotate_and_write_kernel",
        WRITE,
        "tl.rsqrt(mean_square + norm_eps)",
        "tl.rsqrt(mean_square)",
        WRITE_TESTS,
    ),
    Mutation(
        "the norm of a head takes half of it",
        "rotate_and_write_kernel",
        WRITE,
        "(tl.sum(first * first, 1) + tl.sum(second * second, 1)) * (1.0 / HEAD_DIM)",
        "tl.sum(first * first, 1) * (2.0 / HEAD_DIM)",
        WRITE_TESTS,
    ),
    Mutation(
        "padding tokens are written",
        "rotate_and_write_kernel",
        WRITE,
        "if slot >= 0 and (tile + 1) * ROWS > NUM_Q_HEADS:",
        "if (tile + 1) * ROWS > NUM_Q_HEADS:",
        WRITE_TESTS,
    ),
    Mutation(
        "quantised numbers are cut off instead of rounded",
        "rotate_and_write_kernel",
        WRITE,
        "scaled = (scaled + ROUNDER) - ROUNDER",
        "scaled = scaled.to(tl.int32).to(tl.float32)",
        WRITE_TESTS,
    ),
    Mutation(
        "the scale of a head is that of its first half",
        "rotate_and_write_kernel",
        WRITE,
        "tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))",
        "tl.max(tl.abs(first), 1)",
        WRITE_TESTS,
    ),
    Mutation(
        "the norm forgets eps",
        "rms_norm_kernel",
        OPS,
        "(1.0 / HIDDEN_SIZE) + eps)",
        "(1.0 / HIDDEN_SIZE))",
        OPS_TESTS,
    ),
    Mutation(
        "the norm is not that of the sum",
        "rms_norm_kernel",
        OPS,
        "        row = total.to(tl.float32)\n",
        "",
        OPS_TESTS,
    ),
    Mutation(
        "the gate multiplies itself",
        "gate_kernel",
        OPS,
        "up = tl.load(gates + SIZE, mask",
        "up = tl.load(gates, mask",
        OPS_TESTS,
    ),
    Mutation(
        "the product reads past the end of a row",
        "linear_kernel",
        OPS,
        "a = tl.load(input_tile, mask=(depth < in_features - begin)[None, :], other=0.0)",
        "a = tl.load(input_tile)",
        OPS_TESTS,
    ),
    Mutation(
        "a tie goes to the last token",
        "sample_kernel",
        SAMPLER,
        "token_of_lane = tl.where(logit > best_of_lane,",
        "token_of_lane = tl.where(logit >= best_of_lane,",
        SAMPLER_TESTS,
    ),
    Mutation(
        "a token without mass is drawn",
        "sample_kernel",
        SAMPLER,
        "> (target - mass_before).to(tl.float32)) & (weight > 0.0)",
        ">= (target - mass_before).to(tl.float32))",
        SAMPLER_TESTS,
    ),
    Mutation(
        "top-k keeps one token too many",
        "sample_kernel",
        SAMPLER,
        "if tl.sum(above, 0) < target:",
        "if tl.sum(above, 0) <= target:",
        SAMPLER_TESTS,
    ),
    Mutation(
        "a tile without mass is drawn from",
        "sample_kernel",
        SAMPLER,
        "is_drawn = (mass <= target) & (next_mass > mass)",
        "is_drawn = mass <= target",
        SAMPLER_TESTS,
    ),
)
