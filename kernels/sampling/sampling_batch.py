"""How the rows of one step are to be sampled. Knows no sequences and no implementation."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of the rows that sample in this step, on the device of the logits.

    `all_greedy` is known on the host, so that no implementation has to ask the device.
    """

    temperature: torch.Tensor  # [num_rows] float32; 0 = greedy
    top_k: torch.Tensor  # [num_rows] int64; 0 = off
    top_p: torch.Tensor  # [num_rows] float32; 1 = off
    min_p: torch.Tensor  # [num_rows] float32; 0 = off
    uniform: torch.Tensor  # [num_rows] float64 in [0, 1): where each row's cumulative distribution is inverted
    all_greedy: bool
