"""The attention protocol and the one place that chooses an implementation.

Knows the names of the backends; must not know models or the cache manager. Backends are imported only when
chosen, so that an absent optional dependency costs nothing.
"""

from typing import Protocol

import torch

from kernels.attention.metadata import AttentionMetadata, AttentionParams, KVLayer


class AttentionBackend(Protocol):
    """Writes keys and values into blocks and attends over them. Stateless between calls."""

    name: str

    def write_kv(
        self,
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> None:
        """Scatter this step's keys and values to `metadata.slot_mapping`; slot -1 writes nothing."""
        ...

    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:  # [num_tokens, num_q_heads, head_dim], dtype of query
        """Causal attention of every query token over its own sequence's blocks."""
        ...

    def copy_blocks(self, kv_layer: KVLayer, block_copies: torch.Tensor) -> None:  # [num_copies, 2] int64: src, dst
        """Copy whole blocks within a layer (copy-on-write). No dst is the src of another pair."""
        ...
