"""What one attention call needs to know about the batch, and where one layer's keys and values live.

Owns the central types of the kernels. Knows no requests, no scheduler and no model.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One mixed prefill/decode batch. Rows with one query token (decodes) come first.

    Row i owns the query tokens `query_start_loc[i]:query_start_loc[i + 1]`; they are the last tokens of its
    `seq_lens[i]` tokens, all of whose keys and values are in the cache once this step's have been written.
    Tensors live on the device of the KV cache; the host copies are for planners, which must not wait for the device.
    """

    query_start_loc: torch.Tensor  # [num_rows + 1] int32
    seq_lens: torch.Tensor  # [num_rows] int32, tokens in the cache including this step's
    block_tables: torch.Tensor  # [num_rows, max_num_blocks] int32; entries past the sequence's last block are arbitrary
    slot_mapping: torch.Tensor  # [num_tokens] int64, block_id * block_size + offset; -1 = padding, not written
    host_query_start_loc: npt.NDArray[np.int32]  # [num_rows + 1], the same on the host
    host_seq_lens: npt.NDArray[np.int32]  # [num_rows], the same on the host


@dataclass(frozen=True, slots=True)
class KVLayer:
    """The cache of one layer: block-major, head-major within a block (one block of one head is contiguous)."""

    key: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    value: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    key_scale: torch.Tensor | None = None  # [num_blocks, num_kv_heads, block_size] float32, of a quantised cache
    value_scale: torch.Tensor | None = None  # the same of the values: one scale for each slot of each head

    @property
    def block_size(self) -> int:
        """Tokens in one block."""
        return self.key.shape[2]


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What a layer fixes about its attention, once, when the model is built."""

    scale: float  # multiplies q·k, usually head_dim ** -0.5
    sliding_window: int | None = None  # a query at position p sees keys in (p - sliding_window, p]; None = all up to p
    logit_softcap: float | None = None  # scores become cap * tanh(score / cap) before the mask


@dataclass(frozen=True, slots=True)
class Rotation:
    """What happens to query and key heads before they meet: an optional norm of each head, then the rotary embedding.

    Half-rotation layout: element i pairs with i + head_dim / 2.
    """

    cos: torch.Tensor  # [num_tokens, head_dim / 2] float32
    sin: torch.Tensor  # [num_tokens, head_dim / 2] float32
    norm_weight: torch.Tensor | None = None  # [num_q_heads + num_kv_heads, head_dim] float32; None = no norm
    norm_eps: float = 0.0
