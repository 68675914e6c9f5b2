"""Paged attention in plain torch, for machines where neither the native library nor Triton can be had.

Gathers one row's blocks at a time, only those that its queries see, and never the whole cache.
"""

import torch

from kernels.attention.metadata import AttentionMetadata, AttentionParams, KVLayer, Rotation
from kernels.attention.rotation import rotate_heads
from kernels.kv_quant import dequantise, quantise

MAX_QUERY_TOKENS = 128  # per product: bounds the scores held at once


class TorchBackend:
    """Computes in float32 (float64 for float64 queries) on any device."""

    name = "torch"

    def write_kv(
        self,
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> None:
        """Scatter this step's keys and values to `metadata.slot_mapping`; slot -1 writes nothing."""
        _scatter_kv(key, value, kv_layer, metadata.slot_mapping)

    def rotate_and_write(
        self,
        heads: torch.Tensor,  # [num_tokens, num_q_heads + 2 * num_kv_heads, head_dim], queries, keys, values
        rotation: Rotation,
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, num_q_heads, head_dim]
        """Norm and rotate query and key heads, write keys and values to the cache, and return the queries."""
        query, key, value = rotate_heads(heads, rotation, kv_layer.key.shape[1])
        self.write_kv(key, value, kv_layer, metadata)
        return query

    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:  # [num_tokens, num_q_heads, head_dim], dtype of query
        """Causal attention of every query token over its own sequence's blocks; padding tokens give zeros."""
        out = torch.zeros_like(query)
        starts = metadata.query_start_loc.tolist()
        for row, seq_len in enumerate(metadata.seq_lens.tolist()):
            begin, end = starts[row], starts[row + 1]
            if seq_len == 0:  # padding
                continue
            for first in range(begin, end, MAX_QUERY_TOKENS):
                last = min(first + MAX_QUERY_TOKENS, end)
                position = seq_len - (end - first)
                out[first:last] = _attend_tokens(
                    query[first:last], kv_layer, metadata.block_tables[row], position, params
                )
        return out


def _attend_tokens(
    query: torch.Tensor,  # [num_tokens, num_q_heads, head_dim], consecutive tokens of one row
    kv_layer: KVLayer,
    block_table: torch.Tensor,  # [max_num_blocks] int32
    position: int,  # of the first token
    params: AttentionParams,
) -> torch.Tensor:  # [num_tokens, num_q_heads, head_dim], dtype of query
    num_tokens, num_q_heads, head_dim = query.shape
    num_kv_heads = kv_layer.key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    end = position + num_tokens
    first_key = 0 if params.sliding_window is None else max(0, position + 1 - params.sliding_window)
    keys, values = _gather(kv_layer, block_table, first_key, end, dtype)

    # Query heads of one KV head are rows of the same product: [num_kv_heads, group_size * num_tokens, head_dim].
    grouped = query.to(dtype).view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    scores = grouped.reshape(num_kv_heads, -1, head_dim) @ keys.transpose(1, 2) * params.scale
    if params.logit_softcap is not None:
        scores = params.logit_softcap * torch.tanh(scores / params.logit_softcap)
    if num_tokens > 1:  # a single token sees every key that was gathered
        scores = scores.view(num_kv_heads, -1, num_tokens, end - first_key)
        scores = scores.masked_fill(~_visible(position, end, first_key, params, query.device), float("-inf"))
        scores = scores.view(num_kv_heads, -1, end - first_key)
    out = scores.softmax(dim=-1) @ values  # [num_kv_heads, group_size * num_tokens, head_dim]
    out = out.view(num_kv_heads, -1, num_tokens, head_dim).permute(2, 0, 1, 3)
    return out.reshape(num_tokens, num_q_heads, head_dim).to(query.dtype)


def _gather(
    kv_layer: KVLayer, block_table: torch.Tensor, first_key: int, end: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:  # both [num_kv_heads, end - first_key, head_dim]
    block_size = kv_layer.block_size
    first_block = first_key // block_size
    block_ids = block_table[first_block : -(-end // block_size)]
    begin = first_key - first_block * block_size
    gathered = []
    for cache, scales in ((kv_layer.key, kv_layer.key_scale), (kv_layer.value, kv_layer.value_scale)):
        blocks = cache.index_select(0, block_ids)  # [num_gathered, num_kv_heads, block_size, head_dim]
        if scales is not None:
            blocks = dequantise(blocks, scales.index_select(0, block_ids))
        tokens = blocks.transpose(0, 1).flatten(1, 2)
        gathered.append(tokens[:, begin : begin + end - first_key].to(dtype))
    return gathered[0], gathered[1]


def _visible(
    position: int, end: int, first_key: int, params: AttentionParams, device: torch.device
) -> torch.Tensor:  # [num_tokens, num_keys] bool
    query_positions = torch.arange(position, end, device=device)[:, None]
    key_positions = torch.arange(first_key, end, device=device)[None, :]
    visible = key_positions <= query_positions
    if params.sliding_window is not None:
        visible &= key_positions > query_positions - params.sliding_window
    return visible


def _scatter_kv(key: torch.Tensor, value: torch.Tensor, kv_layer: KVLayer, slot_mapping: torch.Tensor) -> None:
    """Write each token's key and value to its slot, converted to the cache's dtype or quantised; -1 writes nothing.

    Args:
        key: [num_tokens, num_kv_heads, head_dim].
        value: [num_tokens, num_kv_heads, head_dim].
        kv_layer: the layer written to.
        slot_mapping: [num_tokens] int64.
    """
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    block_ids, offsets = slots // kv_layer.block_size, slots % kv_layer.block_size
    for cache, scales, rows in (
        (kv_layer.key, kv_layer.key_scale, key[written]),
        (kv_layer.value, kv_layer.value_scale, value[written]),
    ):
        if scales is None:
            cache[block_ids, :, offsets] = rows.to(cache.dtype)
        else:
            cache[block_ids, :, offsets], scales[block_ids, :, offsets] = quantise(rows, cache.dtype)
