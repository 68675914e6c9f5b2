"""The inputs of one forward pass, built by the model runner for one step. Knows no scheduler."""

from dataclasses import dataclass

import torch

from kernels.attention.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of all rows laid end to end, decodes first."""

    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64, position of each token in its own sequence
    logits_indices: torch.Tensor  # [num_logits] int64, the tokens whose logits are wanted
    attn: AttentionMetadata
