"""The oracle: paged attention spelled out one token at a time in float64, for tests and for reading.

Follows the definition, not speed: no other backend shares code with it.
"""

import math

import torch

from kernels.attention.metadata import AttentionMetadata, AttentionParams, KVLayer


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
            keys, values = self._gather(kv_layer, metadata.block_tables[row], seq_len)
            for token in range(starts[row], starts[row + 1]):
                position = seq_len - (starts[row + 1] - token)
                out[token] = self._attend_token(query[token].double(), keys, values, position, params).to(query.dtype)
        return out

    def copy_blocks(self, kv_layer: KVLayer, block_copies: torch.Tensor) -> None:  # [num_copies, 2] int64: src, dst
        """Copy whole blocks within a layer (copy-on-write)."""
        for src, dst in block_copies.tolist():
            kv_layer.key[dst] = kv_layer.key[src]
            kv_layer.value[dst] = kv_layer.value[src]

    def _gather(
        self, kv_layer: KVLayer, block_table: torch.Tensor, seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:  # both [num_kv_heads, seq_len, head_dim] float64
        block_size = kv_layer.block_size
        block_ids = block_table[: -(-seq_len // block_size)].tolist()
        keys = torch.cat([kv_layer.key[block_id] for block_id in block_ids], dim=1)
        values = torch.cat([kv_layer.value[block_id] for block_id in block_ids], dim=1)
        return keys[:, :seq_len].double(), values[:, :seq_len].double()

    def _attend_token(
        self,
        query: torch.Tensor,  # [num_q_heads, head_dim] float64
        keys: torch.Tensor,  # [num_kv_heads, seq_len, head_dim] float64
        values: torch.Tensor,  # [num_kv_heads, seq_len, head_dim] float64
        position: int,
        params: AttentionParams,
    ) -> torch.Tensor:  # [num_q_heads, head_dim] float64
        window = math.inf if params.sliding_window is None else params.sliding_window
        first = int(max(0, position + 1 - window))
        group_size = query.shape[0] // keys.shape[0]
        visible_keys = keys[:, first : position + 1].repeat_interleave(group_size, dim=0)
        visible_values = values[:, first : position + 1].repeat_interleave(group_size, dim=0)
        scores = torch.einsum("hd,hsd->hs", query, visible_keys) * params.scale
        if params.logit_softcap is not None:
            scores = params.logit_softcap * torch.tanh(scores / params.logit_softcap)
        return torch.einsum("hs,hsd->hd", scores.softmax(dim=-1), visible_values)
