"""The oracle: paged attention spelled out one token at a time in float64, for tests and for reading.

Follows the definition, not speed: no other backend shares code with it.
"""

import torch

from kernels.attention.metadata import AttentionMetadata, AttentionParams, KVLayer, Rotation
from kernels.attention.rotation import rotate_heads


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
                kv_layer.key[block_id, :, offset] = key[token]
                kv_layer.value[block_id, :, offset] = value[token]

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
    return kv_layer.key[block_ids, :, offsets].double(), kv_layer.value[block_ids, :, offsets].double()


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
