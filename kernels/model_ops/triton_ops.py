"""A decoder's operations on Triton kernels, for a GPU: chooses launch sizes. Knows no model."""

import torch
import triton
from torch.nn import functional

from kernels.model_ops.ops import Activation
from kernels.model_ops.torch_ops import TorchOps, embed_rows
from kernels.model_ops.triton_kernels import gate_kernel, linear_kernel, rms_norm_kernel, soft_cap_kernel
from kernels.sampling.sampling_batch import SamplingBatch
from kernels.sampling.torch_sampler import token_logprobs
from kernels.sampling.triton_sampler import sample

ELEMENTS_PER_PROGRAM = 1024
ELEMENTS_PER_WARP = 256  # one 128-bit load of 16-bit numbers in each thread
MAX_NORM_WARPS = 16

# The batch-invariant product's tile. Rows of a launch that needs few tiles wait on memory, not on the matrix units, so
# a tall tile costs them little; narrower columns spread the weights of a small projection over more multiprocessors.
TILE_ROWS = 128
WIDE_COLUMNS = 128
NARROW_COLUMNS = 64
MIN_WIDE_TILES = 128  # about the number of multiprocessors of a large GPU
SWIZZLED_ROWS = 8


class TritonOps:
    """See `kernels.model_ops.ops.ModelOps`. All but `linear` are always batch-invariant."""

    name = "triton"

    def __init__(self, *, batch_invariant: bool) -> None:
        """Choose the matrix product.

        Args:
            batch_invariant: a row's result is bitwise the same whatever the number of rows, at the price of a kernel
                that cannot choose its tiles and splits by it, as torch's (cuBLAS) does.
        """
        self.batch_invariant = batch_invariant
        self._torch_ops = TorchOps()

    def linear(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Inputs weight^T + bias."""
        if self.batch_invariant:
            return _invariant_linear(inputs, weight, bias)
        return functional.linear(inputs, weight, bias)

    def embed(self, ids: torch.Tensor, weight: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """Rows of a token embedding times `factor`."""
        return embed_rows(ids, weight, factor)

    def rms_norm(self, inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """X / sqrt(mean(x^2) + eps) * weight."""
        return _rms_norm(inputs, None, weight, eps)[0]

    def add_rms_norm(
        self, inputs: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of inputs + residual, and that sum, in one pass over memory."""
        normed, total = _rms_norm(inputs, residual, weight, eps)
        assert total is not None
        return normed, total

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(first half) * second half."""
        num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
        if num_tokens == 0:
            return out
        assert gate_up.stride(1) == 1
        gate_kernel[(num_tokens, triton.cdiv(size, ELEMENTS_PER_PROGRAM))](
            gate_up,
            out,
            gate_up.stride(0),
            SIZE=size,
            COLUMNS=ELEMENTS_PER_PROGRAM,
            GELU=activation == "gelu_tanh",
            num_warps=ELEMENTS_PER_PROGRAM // ELEMENTS_PER_WARP,
            enable_fp_fusion=True,
        )
        return out

    def rotary_angles(
        self, positions: torch.Tensor, inverse_frequencies: torch.Tensor, magnitude: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of position times frequency, times the magnitude: once a step, so plain torch."""
        return self._torch_ops.rotary_angles(positions, inverse_frequencies, magnitude)

    def soft_cap(self, scores: torch.Tensor, cap: float) -> torch.Tensor:
        """Cap * tanh(scores / cap)."""
        scores = scores.contiguous()
        out = torch.empty_like(scores)
        if scores.numel() == 0:
            return out
        size = scores.shape[-1]
        soft_cap_kernel[(scores.numel() // size, triton.cdiv(size, ELEMENTS_PER_PROGRAM))](
            scores,
            out,
            cap,
            SIZE=size,
            COLUMNS=ELEMENTS_PER_PROGRAM,
            num_warps=ELEMENTS_PER_PROGRAM // ELEMENTS_PER_WARP,
            enable_fp_fusion=True,
        )
        return out

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Choose one token for each row, without waiting for the device."""
        return sample(logits, batch)

    def token_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor | None, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities of some tokens and of each row's best."""
        return token_logprobs(logits, token_ids, num_top)


def _rms_norm(
    inputs: torch.Tensor,  # [num_tokens, hidden_size]
    residual: torch.Tensor | None,  # [num_tokens, hidden_size]
    weight: torch.Tensor,  # [hidden_size] float32
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The norm of inputs (+ residual), and that sum where there is a residual."""
    num_tokens, hidden_size = inputs.shape
    out = torch.empty((num_tokens, hidden_size), dtype=inputs.dtype, device=inputs.device)
    total = None if residual is None else torch.empty_like(out)
    if num_tokens == 0:
        return out, total
    assert inputs.stride(1) == weight.stride(0) == 1 and (residual is None or residual.stride(1) == 1)
    padded_size = triton.next_power_of_2(hidden_size)
    rms_norm_kernel[(num_tokens,)](
        inputs,
        residual,
        weight,
        out,
        total,
        eps,
        inputs.stride(0),
        0 if residual is None else residual.stride(0),
        HIDDEN_SIZE=hidden_size,
        PADDED_SIZE=padded_size,
        num_warps=min(max(1, padded_size // ELEMENTS_PER_WARP), MAX_NORM_WARPS),
        enable_fp_fusion=True,
    )
    return out, total


def _invariant_linear(
    inputs: torch.Tensor,  # [num_tokens, in_features]
    weight: torch.Tensor,  # [out_features, in_features]
    bias: torch.Tensor | None,  # [out_features]
) -> torch.Tensor:  # [num_tokens, out_features]
    """The product by one kernel whose tile depends on the weight alone, never on the number of rows."""
    num_tokens, in_features = inputs.shape
    out_features = weight.shape[0]
    out = torch.empty((num_tokens, out_features), dtype=inputs.dtype, device=inputs.device)
    if num_tokens == 0:
        return out
    assert inputs.stride(1) == weight.stride(1) == 1 and inputs.dtype == weight.dtype
    is_half = inputs.element_size() == 2
    is_wide = is_half and triton.cdiv(out_features, WIDE_COLUMNS) >= MIN_WIDE_TILES
    rows = TILE_ROWS if is_half else TILE_ROWS // 2
    columns = WIDE_COLUMNS if is_wide else NARROW_COLUMNS
    depth = 64 if is_half else 32
    linear_kernel[(triton.cdiv(num_tokens, rows) * triton.cdiv(out_features, columns),)](
        inputs,
        weight,
        bias,
        out,
        num_tokens,
        out_features,
        in_features,
        inputs.stride(0),
        weight.stride(0),
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=depth,
        SWIZZLED_ROWS=SWIZZLED_ROWS,
        EVEN_DEPTH=in_features % depth == 0,
        num_warps=8,
        num_stages=3,
        enable_fp_fusion=True,
    )
    return out
