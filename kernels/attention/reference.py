"""The oracle: paged attention spelled out one token at a time in float64, for tests and for reading.

Follows the definition, not speed: of its attention no other backend shares code with it.
"""

import torch

from kernels.attention.metadata import AttentionMetadata, AttentionParams, KVLayer, Rotation
from kernels.attention.rotation import rotate_heads
from kernels.kv_quant import quantise


class ReferenceBackend:
    """Computes in float64 whatever the inputs' dtype; the output has the query's dtype. Works on any device."""

    name = "reference"

    def write_kv(
        self,
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> None:
        """Scatter this step's keys and values to `metadata.slot_mapping`; slot -1 writes nothing."""
        for token, slot in enumerate(metadata.slot_mapping.tolist()):
            if slot >= 0:
                block_id, offset = divmod(slot, kv_layer.block_size)
                _write_heads(key[token], kv_layer.key, kv_layer.key_scale, block_id, offset)
                _write_heads(value[token], kv_layer.value, kv_layer.value_scale, block_id, offset)

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
            if seq_len == 0:  # padding
                continue
            for token in range(starts[row], starts[row + 1]):
                position = seq_len - (starts[row + 1] - token)
                first = 0 if params.sliding_window is None else max(0, position + 1 - params.sliding_window)
                keys, values = _gather(kv_layer, metadata.block_tables[row], first, position)
                out[token] = _attend_token(query[token].double(), keys, values, params).to(query.dtype)
        return out


def _gather(
    kv_layer: KVLayer, block_table: torch.Tensor, first: int, last: int
) -> tuple[torch.Tensor, torch.Tensor]:  # both [num_keys, num_kv_heads, head_dim] float64
    positions = torch.arange(first, last + 1, device=block_table.device)
    block_ids = block_table[positions // kv_layer.block_size]
    offsets = positions % kv_layer.block_size
    keys = kv_layer.key[block_ids, :, offsets].double()
    values = kv_layer.value[block_ids, :, offsets].double()
    if kv_layer.key_scale is not None and kv_layer.value_scale is not None:
        keys *= kv_layer.key_scale[block_ids, :, offsets, None]
        values *= kv_layer.value_scale[block_ids, :, offsets, None]
    return keys, values


def _write_heads(
    heads: torch.Tensor,  # [num_kv_heads, head_dim]
    cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    scales: torch.Tensor | None,  # [num_blocks, num_kv_heads, block_size] float32
    block_id: int,
    offset: int,
) -> None:
    if scales is None:
        cache[block_id, :, offset] = heads
    else:
        cache[block_id, :, offset], scales[block_id, :, offset] = quantise(heads, cache.dtype)


def _attend_token(
    query: torch.Tensor,  # [num_q_heads, head_dim] float64
    keys: torch.Tensor,  # [num_keys, num_kv_heads, head_dim] float64, every one visible
    values: torch.Tensor,  # [num_keys, num_kv_heads, head_dim] float64
    params: AttentionParams,
) -> torch.Tensor:  # [num_q_heads, head_dim] float64
    group_size = query.shape[0] // keys.shape[1]  # query head h reads KV head h // group_size
    keys = keys.repeat_interleave(group_size, dim=1)
    values = values.repeat_interleave(group_size, dim=1)
    scores = torch.einsum("hd,khd->hk", query, keys) * params.scale
    if params.logit_softcap is not None:
        scores = params.logit_softcap * torch.tanh(scores / params.logit_softcap)
    return torch.einsum("hk,khd->hd", scores.softmax(dim=-1), values)
