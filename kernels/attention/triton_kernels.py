"""The Triton kernels: attention over a work list, the merge of split key ranges, and the KV write.

Each begins with its grid. They know tensors and the lists of planner.py; which items there are is decided there.
Softmax states are in base 2 (m = maximum, l = sum of weights), since exp2 is the hardware's own.
"""
# A kernel's constants are upper case, and its pointers have no type to annotate.
# ruff: noqa: ANN001, ANN201, N803

import triton
import triton.language as tl

from kernels.attention.planner import ITEM_FIELDS, MERGE_FIELDS

ITEM_STRIDE = tl.constexpr(ITEM_FIELDS)
MERGE_STRIDE = tl.constexpr(MERGE_FIELDS)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def finite_max(m):
    """A maximum to subtract: 0 instead of -inf, so that a row that has seen nothing gives exp2(-inf) and not NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def tanh(x):
    """Hyperbolic tangent that saturates, relative error below 3e-7."""
    far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)  # exp2 gives 0 or inf at the ends: -1 or 1, never inf / inf
    square = x * x  # near 0, where that form cancels, an odd polynomial fitted at the Chebyshev nodes of [0, 0.625]
    near = -5.66478e-3 * square + 2.059568e-2
    near = near * square - 5.372268e-2
    near = near * square + 1.333115e-1
    near = near * square - 3.3333263e-1
    near = near * square + 1.0
    return tl.where(tl.abs(x) < 0.625, near * x, far)


@triton.jit
def attend_kernel(
    query,  # [num_tokens, num_q_heads, head_dim]
    key_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    out,  # [num_tokens, num_q_heads, head_dim]
    partial_out,  # [num_slots, num_q_heads, head_dim] float32, not yet divided by the sum
    partial_max,  # [num_slots, num_q_heads] float32
    partial_sum,  # [num_slots, num_q_heads] float32
    block_tables,  # [num_rows, max_num_blocks] int32
    items,  # [num_items, ITEM_FIELDS] int32
    score_scale,  # with a soft cap scale / cap, else scale * log2(e)
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    key_block_stride,
    key_head_stride,
    key_slot_stride,
    value_block_stride,
    value_head_stride,
    value_slot_stride,
    block_tables_stride,
    NUM_Q_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,  # 0 = none
    SOFTCAP: tl.constexpr,  # 0 = none
):
    """One query tile over one range of keys. Row r of the tile is token r // GROUP_SIZE, head r % GROUP_SIZE."""
    # grid: (num_items, num_kv_heads)
    item = items + tl.program_id(0) * ITEM_STRIDE
    kv_head = tl.program_id(1)
    row = tl.load(item).to(tl.int64)
    first_token = tl.load(item + 1)
    num_tokens = tl.load(item + 2)
    position = tl.load(item + 3)
    key_begin = tl.load(item + 4)
    key_end = tl.load(item + 5)
    slot = tl.load(item + 6)

    tile_row = tl.arange(0, QUERY_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    token = tile_row // GROUP_SIZE
    head = kv_head * GROUP_SIZE + tile_row % GROUP_SIZE
    is_row = token < num_tokens
    is_dim = dim < HEAD_DIM
    row_position = position + token
    token_index = (first_token + token).to(tl.int64)
    query_offset = token_index[:, None] * query_token_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(query + query_offset, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    first_key = key_begin  # keys before it are outside every window here: their blocks may belong to others
    if SLIDING_WINDOW > 0:
        first_key = tl.maximum(key_begin, position + 1 - SLIDING_WINDOW)

    m = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
    l = tl.zeros([QUERY_ROWS], tl.float32)  # noqa: E741  (the field's name for it)
    acc = tl.zeros([QUERY_ROWS, PADDED_DIM], tl.float32)
    for tile_begin in tl.range(key_begin, key_end, KEYS):
        key = tile_begin + tl.arange(0, KEYS)
        is_key = (key >= first_key) & (key < key_end)
        # 64 bits before the product: block * stride passes 2^31 in a cache of some gigabytes. Masked table entries are
        # arbitrary, and masked slots may hold NaN, which a weight of 0 would not remove: neither is loaded.
        block = tl.load(block_tables + row * block_tables_stride + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        key_offset = block * key_block_stride + kv_head * key_head_stride + (key % BLOCK_SIZE) * key_slot_stride
        value_offset = block * value_block_stride + kv_head * value_head_stride + (key % BLOCK_SIZE) * value_slot_stride
        k = tl.load(
            key_cache + key_offset[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0
        ).to(q.dtype)
        v = tl.load(
            value_cache + value_offset[:, None] + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0
        ).to(q.dtype)

        scores = tl.dot(q, k, input_precision="ieee") * score_scale
        if SOFTCAP > 0:
            scores = (SOFTCAP * LOG2E) * tanh(scores)
        visible = is_key[None, :] & (key[None, :] <= row_position[:, None])
        if SLIDING_WINDOW > 0:
            visible = visible & (key[None, :] > row_position[:, None] - SLIDING_WINDOW)
        scores = tl.where(visible, scores, float("-inf"))

        new_m = tl.maximum(m, tl.max(scores, 1))
        weights = tl.exp2(scores - finite_max(new_m)[:, None])
        decay = tl.exp2(m - finite_max(new_m))
        l = l * decay + tl.sum(weights, 1)  # noqa: E741
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        m = new_m

    is_out = is_row[:, None] & is_dim[None, :]
    if slot < 0:
        normalised = acc / tl.where(l == 0.0, 1.0, l)[:, None]
        out_offset = token_index[:, None] * out_token_stride + head[:, None] * out_head_stride + dim[None, :]
        tl.store(out + out_offset, normalised.to(out.dtype.element_ty), mask=is_out)
    else:
        slot_head = (slot + token).to(tl.int64) * NUM_Q_HEADS + head
        tl.store(partial_out + slot_head[:, None] * HEAD_DIM + dim[None, :], acc, mask=is_out)
        tl.store(partial_max + slot_head, m, mask=is_row)
        tl.store(partial_sum + slot_head, l, mask=is_row)


@triton.jit
def merge_kernel(
    partial_out,  # [num_slots, num_q_heads, head_dim] float32
    partial_max,  # [num_slots, num_q_heads] float32
    partial_sum,  # [num_slots, num_q_heads] float32
    out,  # [num_tokens, num_q_heads, head_dim]
    merges,  # [num_merges, MERGE_FIELDS] int32
    out_token_stride,
    out_head_stride,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Add up the splits of one query token, first to last: the result does not depend on which finished first."""
    # grid: (num_merges, cdiv(num_q_heads, HEADS))
    merge = merges + tl.program_id(0) * MERGE_STRIDE
    token = tl.load(merge).to(tl.int64)
    first_slot = tl.load(merge + 1)
    num_splits = tl.load(merge + 2)
    slot_stride = tl.load(merge + 3)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, PADDED_DIM)
    is_head = head < NUM_Q_HEADS
    is_out = is_head[:, None] & (dim < HEAD_DIM)[None, :]

    m = tl.full([HEADS], float("-inf"), tl.float32)
    l = tl.zeros([HEADS], tl.float32)  # noqa: E741
    acc = tl.zeros([HEADS, PADDED_DIM], tl.float32)
    for split in tl.range(0, num_splits):
        slot_head = (first_slot + split * slot_stride).to(tl.int64) * NUM_Q_HEADS + head
        split_m = tl.load(partial_max + slot_head, mask=is_head, other=float("-inf"))
        split_l = tl.load(partial_sum + slot_head, mask=is_head, other=0.0)
        split_acc = tl.load(partial_out + slot_head[:, None] * HEAD_DIM + dim[None, :], mask=is_out, other=0.0)
        new_m = tl.maximum(m, split_m)
        decay = tl.exp2(m - finite_max(new_m))
        split_decay = tl.exp2(split_m - finite_max(new_m))
        l = l * decay + split_l * split_decay  # noqa: E741
        acc = acc * decay[:, None] + split_acc * split_decay[:, None]
        m = new_m
    normalised = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    out_offset = token * out_token_stride + head[:, None] * out_head_stride + dim[None, :]
    tl.store(out + out_offset, normalised.to(out.dtype.element_ty), mask=is_out)


@triton.jit
def write_kv_kernel(
    key,  # [num_tokens, num_kv_heads, head_dim]
    value,  # [num_tokens, num_kv_heads, head_dim]
    key_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    slot_mapping,  # [num_tokens] int64
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_block_stride,
    key_cache_head_stride,
    key_slot_stride,
    value_block_stride,
    value_cache_head_stride,
    value_slot_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Scatter one token's key and value to its slot; slot -1 writes nothing."""
    # grid: (num_tokens,)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    head = tl.arange(0, PADDED_HEADS)[:, None]
    dim = tl.arange(0, PADDED_DIM)[None, :]
    mask = (head < NUM_KV_HEADS) & (dim < HEAD_DIM)
    k = tl.load(key + token * key_token_stride + head * key_head_stride + dim, mask=mask)
    v = tl.load(value + token * value_token_stride + head * value_head_stride + dim, mask=mask)
    key_slot = key_cache + block * key_block_stride + offset * key_slot_stride
    value_slot = value_cache + block * value_block_stride + offset * value_slot_stride
    tl.store(key_slot + head * key_cache_head_stride + dim, k.to(key_cache.dtype.element_ty), mask=mask)
    tl.store(value_slot + head * value_cache_head_stride + dim, v.to(value_cache.dtype.element_ty), mask=mask)
