"""The protocol of a decoder's operations besides attention, and the one place that chooses an implementation.

Knows the names of the attention backends, since both choices follow the same device; must not know models.
"""

from typing import Literal, Protocol

import torch

from kernels.quantized_weight import QuantizedWeight
from kernels.sampling.sampling_batch import SamplingBatch

Activation = Literal["silu", "gelu_tanh"]


class ModelOps(Protocol):
    """Stateless operations over rows of hidden states. Norms and gates compute in float32 whatever the dtype."""

    name: str

    def linear(
        self,
        inputs: torch.Tensor,  # [num_tokens, in_features]
        weight: torch.Tensor | QuantizedWeight,  # [out_features, in_features]
        bias: torch.Tensor | None,  # [out_features]
    ) -> torch.Tensor:  # [num_tokens, out_features]
        """Inputs weight^T + bias. Only the native operations take a quantised weight."""
        ...

    def embed(
        self,
        ids: torch.Tensor,  # [num_tokens] int64
        weight: torch.Tensor | QuantizedWeight,  # [vocab_size, hidden_size]
        factor: float = 1.0,  # multiplies every value
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        """Rows of a token embedding. Only the native operations take a quantised weight."""
        ...

    def rms_norm(
        self,
        inputs: torch.Tensor,  # [num_tokens, hidden_size]
        weight: torch.Tensor,  # [hidden_size] float32
        eps: float,
    ) -> torch.Tensor:  # [num_tokens, hidden_size], dtype of inputs
        """X / sqrt(mean(x^2) + eps) * weight (RMSNorm, Zhang and Sennrich 2019)."""
        ...

    def add_rms_norm(
        self,
        inputs: torch.Tensor,  # [num_tokens, hidden_size]
        residual: torch.Tensor,  # [num_tokens, hidden_size]
        weight: torch.Tensor,  # [hidden_size] float32
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # both [num_tokens, hidden_size]
        """The norm of inputs + residual, and that sum: the next residual."""
        ...

    def gate(
        self,
        gate_up: torch.Tensor,  # [num_tokens, 2 * intermediate_size]
        activation: Activation,
    ) -> torch.Tensor:  # [num_tokens, intermediate_size]
        """activation(first half) * second half."""
        ...

    def rotary_angles(
        self,
        positions: torch.Tensor,  # [num_tokens] int64
        inverse_frequencies: torch.Tensor,  # [head_dim / 2] float32, radians per position
        magnitude: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # both [num_tokens, head_dim / 2] float32
        """Cosine and sine of position times frequency, times the magnitude."""
        ...

    def soft_cap(self, scores: torch.Tensor, cap: float) -> torch.Tensor:  # any shape, float32
        """Cap * tanh(scores / cap)."""
        ...

    def sample(
        self,
        logits: torch.Tensor,  # [num_rows, vocab_size] float32
        batch: SamplingBatch,
    ) -> torch.Tensor:  # [num_rows] int64
        """Choose one token for each row; see `kernels.sampling`."""
        ...

    def token_logprobs(
        self,
        logits: torch.Tensor,  # [num_rows, vocab_size] float32
        token_ids: torch.Tensor | None,  # [num_rows] int64; None = only the best are wanted
        num_top: int,  # as many as the vocabulary has, at most
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities under the plain softmax, whatever the sampling parameters.

        Returns:
            Those of `token_ids`, [num_rows], or [0] without them; the `num_top` best token ids, [num_rows, num_top];
            and theirs, best first. A row's order depends on no other row, and no other row's on how many it wants.
        """
        ...


def select_ops(attention_backend: str, device: torch.device, *, batch_invariant: bool) -> ModelOps:
    """Choose the operations, once at start.

    Args:
        attention_backend: the name of the backend that `select_backend` chose.
        device: where the weights live.
        batch_invariant: every row's result is bitwise the same whatever else is in the batch. The native operations
            always keep that; plain torch chooses the order of its sums by the number of rows.
    """
    if attention_backend == "triton":
        from kernels.model_ops.triton_ops import TritonOps

        return TritonOps(batch_invariant=batch_invariant)
    if attention_backend == "cpu":
        from kernels.model_ops.native_ops import NativeOps

        return NativeOps()
    assert not batch_invariant, f"operations beside the {attention_backend} attention backend are not batch-invariant"
    from kernels.model_ops.torch_ops import TorchOps

    return TorchOps()
