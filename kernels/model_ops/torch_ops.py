"""A decoder's operations in plain torch, on any device. Knows no model."""

import torch
from torch.nn import functional

from kernels.model_ops.ops import Activation
from kernels.sampling.sampling_batch import SamplingBatch
from kernels.sampling.torch_sampler import sample, token_logprobs


class TorchOps:
    """See `kernels.model_ops.ops.ModelOps`."""

    name = "torch"

    def linear(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Inputs weight^T + bias."""
        return functional.linear(inputs, weight, bias)

    def embed(self, ids: torch.Tensor, weight: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """Rows of a token embedding times `factor`."""
        return embed_rows(ids, weight, factor)

    def rms_norm(self, inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """X / sqrt(mean(x^2) + eps) * weight."""
        return functional.rms_norm(_widen(inputs), weight.shape, weight, eps).to(inputs.dtype)

    def add_rms_norm(
        self, inputs: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of inputs + residual, and that sum."""
        total = inputs + residual
        return self.rms_norm(total, weight, eps), total

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(first half) * second half."""
        gate, up = _widen(gate_up).chunk(2, dim=-1)
        activated = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
        return (activated * up).to(gate_up.dtype)

    def rotary_angles(
        self, positions: torch.Tensor, inverse_frequencies: torch.Tensor, magnitude: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of position times frequency, times the magnitude."""
        angles = positions.float()[:, None] * inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if magnitude == 1.0 else (cos * magnitude, sin * magnitude)

    def soft_cap(self, scores: torch.Tensor, cap: float) -> torch.Tensor:
        """Cap * tanh(scores / cap)."""
        return cap * torch.tanh(scores / cap)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Choose one token for each row."""
        return sample(logits, batch)

    def token_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor | None, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities of some tokens and of each row's best."""
        return token_logprobs(logits, token_ids, num_top)


def embed_rows(ids: torch.Tensor, weight: torch.Tensor, factor: float) -> torch.Tensor:
    """Rows of a float token embedding times `factor`, [num_tokens, hidden_size]."""
    rows = functional.embedding(ids, weight)
    return rows if factor == 1.0 else rows * factor


def _widen(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
