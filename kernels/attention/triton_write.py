"""The fused write into the paged cache: head norm, rotary embedding, quantisation and scatter in one kernel.

A plain write of keys and values is the same kernel without queries, norm and rotation. Knows nothing of attention.
"""
# A kernel's constants are upper case, and its pointers have no type to annotate.
# ruff: noqa: ANN001, ANN201, N803, N806

import torch
import triton
import triton.language as tl

from kernels.attention.metadata import KVLayer, Rotation
from kernels.kv_quant import MIN_ABSMAX, QUANTISED_MAX

SMALLEST_ABSMAX = tl.constexpr(MIN_ABSMAX)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves a float32 no fraction bits, rounded half to even

# Two warps with 16 elements a thread and half: each half of a head is one 128-bit load of 16-bit numbers.
ELEMENTS_PER_PROGRAM = 1024
NUM_WARPS = 2


@triton.jit
def load_halves(pointers, element, is_element, HALF_DIM: tl.constexpr):
    """Both halves of some heads, [ROWS, PADDED_HALF] float32 each."""
    first = tl.load(pointers + element, mask=is_element, other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF_DIM + element, mask=is_element, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_halves(pointers, first, second, element, is_element, HALF_DIM: tl.constexpr):
    """Both halves of some heads, [ROWS, PADDED_HALF] each, in the dtype of the destination."""
    tl.store(pointers + element, first.to(pointers.dtype.element_ty), mask=is_element)
    tl.store(pointers + HALF_DIM + element, second.to(pointers.dtype.element_ty), mask=is_element)


@triton.jit
def quantise_half(x, multiplier, QUANTISED_RANGE: tl.constexpr, IS_INTEGER: tl.constexpr):
    """The numbers that the cache's dtype holds, in float32; the clamp also keeps the product out of a fused add."""
    scaled = tl.minimum(tl.maximum(x * multiplier[:, None], -QUANTISED_RANGE), QUANTISED_RANGE)
    if IS_INTEGER:
        scaled = (scaled + ROUNDER) - ROUNDER
    return scaled


@triton.jit
def scatter_heads(
    cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    scales,  # [num_blocks, num_kv_heads, block_size] float32; None = the cache is not quantised
    first,  # [ROWS, PADDED_HALF] float32
    second,  # [ROWS, PADDED_HALF] float32
    slot,  # int64
    kv_head,  # [ROWS, 1] int64
    is_row,  # [ROWS, 1]
    element,  # [1, PADDED_HALF]
    is_element,  # [1, PADDED_HALF]
    block_stride,
    head_stride,
    slot_stride,
    scale_block_stride,
    scale_head_stride,
    HALF_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUANTISED_RANGE: tl.constexpr,
    IS_INTEGER: tl.constexpr,
):
    """Some heads of one token into its slot, quantised where there are scales."""
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    if scales is not None:
        absmax = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        absmax = tl.maximum(absmax, SMALLEST_ABSMAX)
        multiplier = tl.div_rn(tl.full(absmax.shape, QUANTISED_RANGE, tl.float32), absmax)
        scale = tl.div_rn(absmax, tl.full(absmax.shape, QUANTISED_RANGE, tl.float32))[:, None]
        scale_pointers = scales + block * scale_block_stride + kv_head * scale_head_stride + offset
        tl.store(scale_pointers, scale, mask=is_row)
        first = quantise_half(first, multiplier, QUANTISED_RANGE, IS_INTEGER)
        second = quantise_half(second, multiplier, QUANTISED_RANGE, IS_INTEGER)
    pointers = cache + block * block_stride + kv_head * head_stride + offset * slot_stride
    store_halves(pointers, first, second, element, is_row & is_element, HALF_DIM)


@triton.jit
def rotate_and_write_kernel(
    heads,  # [num_tokens, num_q_heads + num_kv_heads, head_dim], queries, then keys
    value,  # [num_tokens, num_kv_heads, head_dim]
    cos,  # [num_tokens, head_dim / 2] float32; None = no rotation
    sin,  # [num_tokens, head_dim / 2] float32; None = no rotation
    norm_weight,  # [num_q_heads + num_kv_heads, head_dim] float32; None = no norm
    query_out,  # [num_tokens, num_q_heads, head_dim]; None = there are no queries
    key_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    key_scale,  # [num_blocks, num_kv_heads, block_size] float32; None = not quantised
    value_scale,  # [num_blocks, num_kv_heads, block_size] float32; None = not quantised
    slot_mapping,  # [num_tokens] int64
    norm_eps,
    heads_token_stride,
    heads_head_stride,
    value_token_stride,
    value_head_stride,
    key_block_stride,
    key_cache_head_stride,
    key_slot_stride,
    value_block_stride,
    value_cache_head_stride,
    value_slot_stride,
    scale_block_stride,
    scale_head_stride,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    QUANTISED_RANGE: tl.constexpr,  # 0 = not quantised
    IS_INTEGER: tl.constexpr,
):
    """Some heads of one token: queries and keys, which share a tile whatever their ratio, or values."""
    # grid: (num_tokens, cdiv(num_q_heads + num_kv_heads, ROWS) + cdiv(num_kv_heads, ROWS))
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    NUM_ROTATED: tl.constexpr = NUM_Q_HEADS + NUM_KV_HEADS
    NUM_ROTATED_TILES: tl.constexpr = (NUM_ROTATED + ROWS - 1) // ROWS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    row = tl.arange(0, ROWS)[:, None]
    element = tl.arange(0, PADDED_HALF)[None, :]
    is_element = element < HALF_DIM

    if tile >= NUM_ROTATED_TILES:
        if slot < 0:
            return
        kv_head = ((tile - NUM_ROTATED_TILES) * ROWS + row).to(tl.int64)
        is_row = kv_head < NUM_KV_HEADS
        pointers = value + token * value_token_stride + kv_head * value_head_stride
        first, second = load_halves(pointers, element, is_row & is_element, HALF_DIM)
        scatter_heads(
            value_cache, value_scale, first, second, slot, kv_head, is_row, element, is_element,
            value_block_stride, value_cache_head_stride, value_slot_stride, scale_block_stride, scale_head_stride,
            HALF_DIM, BLOCK_SIZE, QUANTISED_RANGE, IS_INTEGER,
        )  # fmt: skip
        return

    if slot < 0 and tile * ROWS >= NUM_Q_HEADS:
        return
    head = (tile * ROWS + row).to(tl.int64)
    is_row = head < NUM_ROTATED
    pointers = heads + token * heads_token_stride + head * heads_head_stride
    first, second = load_halves(pointers, element, is_row & is_element, HALF_DIM)
    if norm_weight is not None:
        mean_square = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) * (1.0 / HEAD_DIM)
        scale = tl.rsqrt(mean_square + norm_eps)[:, None]
        weights = norm_weight + head * HEAD_DIM
        first_weight, second_weight = load_halves(weights, element, is_row & is_element, HALF_DIM)
        first = first * scale * first_weight
        second = second * scale * second_weight
    if cos is not None:
        token_cos = tl.load(cos + token * HALF_DIM + element, mask=is_element, other=0.0)
        token_sin = tl.load(sin + token * HALF_DIM + element, mask=is_element, other=0.0)
        turned = first * token_cos - second * token_sin
        second = second * token_cos + first * token_sin
        first = turned
    # Rounded to the model's dtype before it is quantised, as a write after a rotation of its own would have it.
    first = first.to(heads.dtype.element_ty)
    second = second.to(heads.dtype.element_ty)
    if query_out is not None:
        queries = query_out + (token * NUM_Q_HEADS + head) * HEAD_DIM
        store_halves(queries, first, second, element, (head < NUM_Q_HEADS) & is_element, HALF_DIM)
    if slot >= 0 and (tile + 1) * ROWS > NUM_Q_HEADS:
        scatter_heads(
            key_cache, key_scale, first.to(tl.float32), second.to(tl.float32), slot, head - NUM_Q_HEADS,
            (head >= NUM_Q_HEADS) & is_row, element, is_element,
            key_block_stride, key_cache_head_stride, key_slot_stride, scale_block_stride, scale_head_stride,
            HALF_DIM, BLOCK_SIZE, QUANTISED_RANGE, IS_INTEGER,
        )  # fmt: skip


def launch_write_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    kv_layer: KVLayer,
    slot_mapping: torch.Tensor,  # [num_tokens] int64
) -> None:
    """Scatter keys and values to their slots, quantised where the cache is; slot -1 writes nothing."""
    _launch(key, value, None, None, kv_layer, slot_mapping)


def launch_rotate_and_write(
    heads: torch.Tensor,  # [num_tokens, num_q_heads + 2 * num_kv_heads, head_dim], queries, keys, values
    rotation: Rotation,
    kv_layer: KVLayer,
    slot_mapping: torch.Tensor,  # [num_tokens] int64
) -> torch.Tensor:  # [num_tokens, num_q_heads, head_dim], contiguous
    """Norm and rotate query and key heads, write keys and values to their slots, and return the queries.

    Slot -1 writes nothing; the query of such a token is computed like any other.
    """
    num_tokens, num_heads, head_dim = heads.shape
    num_kv_heads = kv_layer.key.shape[1]
    query = torch.empty((num_tokens, num_heads - 2 * num_kv_heads, head_dim), dtype=heads.dtype, device=heads.device)
    _launch(heads[:, :-num_kv_heads], heads[:, -num_kv_heads:], rotation, query, kv_layer, slot_mapping)
    return query


def _launch(
    heads: torch.Tensor,  # [num_tokens, num_q_heads + num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    rotation: Rotation | None,
    query_out: torch.Tensor | None,  # [num_tokens, num_q_heads, head_dim]
    kv_layer: KVLayer,
    slot_mapping: torch.Tensor,  # [num_tokens] int64
) -> None:
    num_tokens, num_kv_heads, head_dim = value.shape
    if num_tokens == 0:
        return
    key_cache, value_cache = kv_layer.key, kv_layer.value
    assert head_dim % 2 == 0 and key_cache.shape[1] == num_kv_heads and key_cache.shape[3] == head_dim
    assert heads.stride(2) == value.stride(2) == key_cache.stride(3) == value_cache.stride(3) == 1
    if rotation is not None:
        assert rotation.cos.is_contiguous() and rotation.sin.is_contiguous()
        assert rotation.norm_weight is None or rotation.norm_weight.is_contiguous()
    scale_strides = (0, 0)
    if kv_layer.key_scale is not None and kv_layer.value_scale is not None:
        assert kv_layer.key_scale.stride() == kv_layer.value_scale.stride() and kv_layer.key_scale.stride(2) == 1
        scale_strides = kv_layer.key_scale.stride()[:2]
    padded_half = triton.next_power_of_2(head_dim // 2)
    num_rotated = heads.shape[1]
    rows = min(triton.next_power_of_2(num_rotated), max(1, ELEMENTS_PER_PROGRAM // (2 * padded_half)))
    grid = (num_tokens, triton.cdiv(num_rotated, rows) + triton.cdiv(num_kv_heads, rows))
    rotate_and_write_kernel[grid](
        heads,
        value,
        rotation.cos if rotation else None,
        rotation.sin if rotation else None,
        rotation.norm_weight if rotation else None,
        query_out,
        key_cache,
        value_cache,
        kv_layer.key_scale,
        kv_layer.value_scale,
        slot_mapping,
        rotation.norm_eps if rotation else 0.0,
        *heads.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *scale_strides,
        NUM_Q_HEADS=num_rotated - num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_HALF=padded_half,
        BLOCK_SIZE=kv_layer.block_size,
        ROWS=rows,
        QUANTISED_RANGE=QUANTISED_MAX.get(key_cache.dtype, 0.0),
        IS_INTEGER=key_cache.dtype == torch.int8,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
