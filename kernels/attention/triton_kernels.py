"""The Triton attention kernels: attention over a work list, and the merge of split key ranges.

Each begins with its grid. They know tensors and the lists of planner.py; which items there are is decided there.
Softmax states are in base 2 (m = maximum, l = sum of weights), since exp2 is the hardware's own.
"""
# A kernel's constants are upper case, its pointers have no type to annotate, and l is the field's name for a sum.
# ruff: noqa: ANN001, ANN201, N803, N806, E741

import triton
import triton.language as tl

from kernels.attention.planner import ITEM_FIELDS, MERGE_FIELDS
from kernels.triton_math import LOG2E, tanh

ITEM_STRIDE = tl.constexpr(ITEM_FIELDS)
MERGE_STRIDE = tl.constexpr(MERGE_FIELDS)


@triton.jit
def finite_max(m):
    """A maximum to subtract: 0 instead of -inf, so that a row that has seen nothing gives exp2(-inf) and not NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def merge_states(m, l, acc, later_m, later_l, later_acc):
    """The softmax state of two ranges of keys, the later one second.

    The multiply-adds are explicit: two kernels merge by this function, and a compiler free to choose which product
    it fuses could choose differently in each. An empty state leaves the other one as it is, to the bit.
    """
    new_m = tl.maximum(m, later_m)
    decay = tl.exp2(m - finite_max(new_m))
    later_decay = tl.exp2(later_m - finite_max(new_m))
    l = tl.fma(l, decay, later_l * later_decay)
    acc = tl.fma(acc, decay[:, None], later_acc * later_decay[:, None])
    return new_m, l, acc


@triton.jit
def normalise(l, acc):
    """The weighted mean of the values; 0 for a row that has seen nothing."""
    return acc / tl.where(l == 0.0, 1.0, l)[:, None]


@triton.jit
def load_tile(pointers, is_key, is_dim, MASK_KEYS: tl.constexpr, MASK_DIMS: tl.constexpr):
    """Keys or values of a tile, 0 where masked; a load that needs no mask gets none."""
    if MASK_KEYS and MASK_DIMS:
        tile = tl.load(pointers, mask=is_key & is_dim, other=0.0)
    elif MASK_KEYS:
        tile = tl.load(pointers, mask=is_key, other=0.0)
    elif MASK_DIMS:
        tile = tl.load(pointers, mask=is_dim, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def attend_tile(
    q,
    m,
    l,
    acc,
    tile_begin,
    first_key,
    key_end,
    row_position,
    block_table,
    key_head,
    value_head,
    key_scale_head,
    value_scale_head,
    score_scale,
    key_block_stride,
    key_slot_stride,
    value_block_stride,
    value_slot_stride,
    scale_block_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    QUANTISED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The softmax state after one more tile of keys. Unmasked tiles are visible to every row, all their keys."""
    key = tile_begin + tl.arange(0, KEYS)
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    # Keys before first_key are outside every window here: their blocks may belong to others by now. Table entries past
    # the last block are arbitrary, and slots past the last key may hold NaN, which a weight of 0 would not remove.
    is_key = (key >= first_key) & (key < key_end)
    # Block ids become 64 bits before the product: block * stride passes 2^31 in a cache of some gigabytes.
    if BLOCK_SIZE % KEYS == 0:  # the tile lies in one block, whose id is one scalar
        block = tl.load(block_table + tile_begin // BLOCK_SIZE).to(tl.int64)
        slot = tile_begin % BLOCK_SIZE + tl.arange(0, KEYS)
    else:
        if MASKED:
            block = tl.load(block_table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        else:
            block = tl.load(block_table + key // BLOCK_SIZE).to(tl.int64)
        slot = key % BLOCK_SIZE
    key_offset = block * key_block_stride + slot * key_slot_stride
    value_offset = block * value_block_stride + slot * value_slot_stride
    MASK_DIMS: tl.constexpr = HEAD_DIM != PADDED_DIM
    k = load_tile(key_head + key_offset[None, :] + dim[:, None], is_key[None, :], is_dim[:, None], MASKED, MASK_DIMS)
    v = load_tile(
        value_head + value_offset[:, None] + dim[None, :], is_key[:, None], is_dim[None, :], MASKED, MASK_DIMS
    )

    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if QUANTISED:
        scale_offset = block * scale_block_stride + slot
        key_scale = load_tile(key_scale_head + scale_offset, is_key, is_key, MASKED, False)
        value_scale = load_tile(value_scale_head + scale_offset, is_key, is_key, MASKED, False)
        scores = scores * (key_scale * score_scale)[None, :]
    else:
        scores = scores * score_scale
    if SOFTCAP > 0:
        scores = (SOFTCAP * LOG2E) * tanh(scores)
    if MASKED:
        visible = is_key[None, :] & (key[None, :] <= row_position[:, None])
        if SLIDING_WINDOW > 0:
            visible = visible & (key[None, :] > row_position[:, None] - SLIDING_WINDOW)
        scores = tl.where(visible, scores, float("-inf"))

    new_m = tl.maximum(m, tl.max(scores, 1))
    if MASKED:
        weights = tl.exp2(scores - finite_max(new_m)[:, None])
        decay = tl.exp2(m - finite_max(new_m))
    else:  # every row has seen a key
        weights = tl.exp2(scores - new_m[:, None])
        decay = tl.exp2(m - new_m)
    l = l * decay + tl.sum(weights, 1)
    if QUANTISED:
        weights = weights * value_scale[None, :]
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
    return new_m, l, acc


@triton.jit
def attend_range(
    q,
    begin,  # on the grid of tiles
    end,
    first_key,
    position,
    num_tokens,
    row_position,
    block_table,
    key_head,
    value_head,
    key_scale_head,
    value_scale_head,
    score_scale,
    key_block_stride,
    key_slot_stride,
    value_block_stride,
    value_slot_stride,
    scale_block_stride,
    QUERY_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """The softmax state of the keys begin:end. Tiles that every row sees whole run first, and without any mask."""
    m = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
    l = tl.zeros([QUERY_ROWS], tl.float32)
    acc = tl.zeros([QUERY_ROWS, PADDED_DIM], tl.float32)
    full_begin = begin
    # The first row sees the keys up to its own position, and the rows after it see no fewer.
    full_end = tl.maximum(tl.minimum(end, position + 1), begin) // KEYS * KEYS
    if SLIDING_WINDOW > 0:
        last_window = position + num_tokens - SLIDING_WINDOW  # the first key that the last row sees
        full_begin = tl.maximum(begin, (last_window + KEYS - 1) // KEYS * KEYS)
        full_begin = tl.minimum(full_begin, end)
        for tile_begin in tl.range(begin, full_begin, KEYS):
            m, l, acc = attend_tile(
                q, m, l, acc, tile_begin, first_key, end, row_position, block_table,
                key_head, value_head, key_scale_head, value_scale_head, score_scale,
                key_block_stride, key_slot_stride, value_block_stride, value_slot_stride, scale_block_stride,
                HEAD_DIM, PADDED_DIM, BLOCK_SIZE, KEYS, SLIDING_WINDOW, SOFTCAP, QUANTISED, True,
            )  # fmt: skip
    for tile_begin in tl.range(full_begin, full_end, KEYS):
        m, l, acc = attend_tile(
            q, m, l, acc, tile_begin, first_key, end, row_position, block_table,
            key_head, value_head, key_scale_head, value_scale_head, score_scale,
            key_block_stride, key_slot_stride, value_block_stride, value_slot_stride, scale_block_stride,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, KEYS, SLIDING_WINDOW, SOFTCAP, QUANTISED, False,
        )  # fmt: skip
    for tile_begin in tl.range(tl.maximum(full_begin, full_end), end, KEYS):
        m, l, acc = attend_tile(
            q, m, l, acc, tile_begin, first_key, end, row_position, block_table,
            key_head, value_head, key_scale_head, value_scale_head, score_scale,
            key_block_stride, key_slot_stride, value_block_stride, value_slot_stride, scale_block_stride,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, KEYS, SLIDING_WINDOW, SOFTCAP, QUANTISED, True,
        )  # fmt: skip
    return m, l, acc


@triton.jit(do_not_specialize=["block_tables_stride"])
def attend_kernel(
    query,  # [num_tokens, num_q_heads, head_dim]
    key_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    key_scale,  # [num_blocks, num_kv_heads, block_size] float32, not read unless QUANTISED
    value_scale,  # [num_blocks, num_kv_heads, block_size] float32, not read unless QUANTISED
    out,  # [num_tokens, num_q_heads, head_dim]
    partial_out,  # [num_slots, num_q_heads, head_dim] float32, not yet divided by the sum
    partial_max,  # [num_slots, num_q_heads] float32
    partial_sum,  # [num_slots, num_q_heads] float32
    block_tables,  # [num_rows, max_num_blocks] int32
    items,  # [capacity, ITEM_FIELDS] int32
    num_items,  # [1] int32, how many of the items are real
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
    scale_block_stride,
    scale_head_stride,
    block_tables_stride,
    NUM_Q_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENT_KEYS: tl.constexpr,  # 0 = one running softmax; else each aligned segment is reduced alone, then merged
    SLIDING_WINDOW: tl.constexpr,  # 0 = none
    SOFTCAP: tl.constexpr,  # 0 = none
    QUANTISED: tl.constexpr,
):
    """One query tile over one range of keys. Row r of the tile is token r // GROUP_SIZE, head r % GROUP_SIZE."""
    # grid: (capacity * num_kv_heads,), the heads of an item side by side, so that the longest items start first
    NUM_KV_HEADS: tl.constexpr = NUM_Q_HEADS // GROUP_SIZE
    item_index = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    if item_index >= tl.load(num_items):
        return
    item = items + item_index * ITEM_STRIDE
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
    # A group that does not divide the tile leaves rows over at the end, with only some heads of one more token.
    is_row = (token < num_tokens) & (tile_row < QUERY_ROWS // GROUP_SIZE * GROUP_SIZE)
    is_out = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    row_position = position + token
    token_index = (first_token + token).to(tl.int64)
    query_offset = token_index[:, None] * query_token_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(query + query_offset, mask=is_out, other=0.0)

    first_key = key_begin
    if SLIDING_WINDOW > 0:
        first_key = tl.maximum(key_begin, position + 1 - SLIDING_WINDOW)
    block_table = block_tables + row * block_tables_stride
    key_head = key_cache + kv_head.to(tl.int64) * key_head_stride
    value_head = value_cache + kv_head.to(tl.int64) * value_head_stride
    key_scale_head = key_scale + kv_head.to(tl.int64) * scale_head_stride
    value_scale_head = value_scale + kv_head.to(tl.int64) * scale_head_stride
    if SEGMENT_KEYS > 0:
        m = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
        l = tl.zeros([QUERY_ROWS], tl.float32)
        acc = tl.zeros([QUERY_ROWS, PADDED_DIM], tl.float32)
        for segment in tl.range(key_begin // SEGMENT_KEYS * SEGMENT_KEYS, key_end, SEGMENT_KEYS):
            begin = tl.maximum(segment, key_begin)
            end = tl.minimum(segment + SEGMENT_KEYS, key_end)
            segment_m, segment_l, segment_acc = attend_range(
                q, begin, end, first_key, position, num_tokens, row_position, block_table,
                key_head, value_head, key_scale_head, value_scale_head, score_scale,
                key_block_stride, key_slot_stride, value_block_stride, value_slot_stride, scale_block_stride,
                QUERY_ROWS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, KEYS, SLIDING_WINDOW, SOFTCAP, QUANTISED,
            )  # fmt: skip
            m, l, acc = merge_states(m, l, acc, segment_m, segment_l, segment_acc)
    else:
        m, l, acc = attend_range(
            q, key_begin, key_end, first_key, position, num_tokens, row_position, block_table,
            key_head, value_head, key_scale_head, value_scale_head, score_scale,
            key_block_stride, key_slot_stride, value_block_stride, value_slot_stride, scale_block_stride,
            QUERY_ROWS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, KEYS, SLIDING_WINDOW, SOFTCAP, QUANTISED,
        )  # fmt: skip

    if slot < 0:
        out_offset = token_index[:, None] * out_token_stride + head[:, None] * out_head_stride + dim[None, :]
        tl.store(out + out_offset, normalise(l, acc).to(out.dtype.element_ty), mask=is_out)
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
    merges,  # [capacity, MERGE_FIELDS] int32
    num_merges,  # [1] int32, how many of the merges are real
    out_token_stride,
    out_head_stride,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,  # loaded before the first of them is merged: one by one, each would wait for memory
):
    """Add up the splits of one query token, first to last: the result does not depend on which finished first."""
    # grid: (capacity, cdiv(num_q_heads, HEADS))
    if tl.program_id(0) >= tl.load(num_merges):
        return
    merge = merges + tl.program_id(0) * MERGE_STRIDE
    token = tl.load(merge).to(tl.int64)
    first_slot = tl.load(merge + 1)
    num_splits = tl.load(merge + 2)
    slot_stride = tl.load(merge + 3)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM

    m = tl.full([HEADS], float("-inf"), tl.float32)
    l = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, PADDED_DIM], tl.float32)
    for first in tl.range(0, num_splits, SPLITS):
        for i in tl.static_range(SPLITS):
            is_split = head < tl.where(first + i < num_splits, NUM_Q_HEADS, 0)
            slot_head = (first_slot + (first + i) * slot_stride).to(tl.int64) * NUM_Q_HEADS + head
            split_m = tl.load(partial_max + slot_head, mask=is_split, other=float("-inf"))
            split_l = tl.load(partial_sum + slot_head, mask=is_split, other=0.0)
            split_offset = slot_head[:, None] * HEAD_DIM + dim[None, :]
            split_acc = tl.load(partial_out + split_offset, mask=is_split[:, None] & is_dim[None, :], other=0.0)
            m, l, acc = merge_states(m, l, acc, split_m, split_l, split_acc)
    out_offset = token * out_token_stride + head[:, None] * out_head_stride + dim[None, :]
    is_out = (head < NUM_Q_HEADS)[:, None] & is_dim[None, :]
    tl.store(out + out_offset, normalise(l, acc).to(out.dtype.element_ty), mask=is_out)
