"""A decoder's operations on the native CPU library: batch-invariant, every row's result bitwise its own.

Turns tensors into pointers and sizes, and nothing else; the arithmetic is in kernels/cpu.
"""

import ctypes

import torch

from kernels.cpu.native_library import (
    ACTIVATIONS,
    INSTRUCTION_SETS,
    EmbedArgs,
    GateArgs,
    LinearArgs,
    QuantizedLinearArgs,
    QuantizedWeightArgs,
    RmsNormArgs,
    RotaryAnglesArgs,
    SoftCapArgs,
    check_status,
    element_type,
    load_library,
    select_instruction_set,
)
from kernels.model_ops.ops import Activation
from kernels.model_ops.torch_ops import embed_rows
from kernels.quantized_weight import QuantizedWeight
from kernels.sampling.native_sampler import NativeSampler
from kernels.sampling.sampling_batch import SamplingBatch


class NativeOps:
    """See `kernels.model_ops.ops.ModelOps`. Takes float32, bfloat16 and float16, computes in float32.

    Runs on torch's own threads, whose number changes no result.
    """

    name = "native"

    def __init__(self, instruction_set: str | None = None) -> None:
        """Load the library.

        Args:
            instruction_set: one of `supported_instruction_sets`; None = the best.

        Raises:
            NativeLibraryError: the library is not built or does not load.
            ValueError: this processor or this build lacks the instruction set.
        """
        self._library = load_library()
        self.instruction_set = select_instruction_set(self._library, instruction_set)
        self._instruction_set_code = INSTRUCTION_SETS[self.instruction_set]
        self._sampler = NativeSampler(self._library, self._instruction_set_code)

    def linear(
        self, inputs: torch.Tensor, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Inputs weight^T + bias, rounded once. Float32 inputs of a quantised weight are rounded to int8 in its groups.

        Raises:
            ValueError: a dtype that the library does not take.
        """
        inputs = inputs if inputs.stride(1) == 1 else inputs.contiguous()
        if isinstance(weight, QuantizedWeight):
            return self._quantized_linear(inputs, weight, bias)
        num_rows, in_features = inputs.shape
        assert weight.shape[1] == in_features and weight.dtype == inputs.dtype
        assert bias is None or (bias.shape == weight.shape[:1] and bias.dtype == inputs.dtype)
        out = torch.empty((num_rows, weight.shape[0]), dtype=inputs.dtype)
        args = LinearArgs(
            inputs=inputs.data_ptr(),
            weight=_pointer(weight),
            bias=None if bias is None else _pointer(bias),
            out=out.data_ptr(),
            num_rows=num_rows,
            num_outputs=weight.shape[0],
            in_features=in_features,
            input_stride=inputs.stride(0),
            element_type=element_type(inputs.dtype),
            instruction_set=self._instruction_set_code,
            num_threads=torch.get_num_threads(),
        )
        check_status(self._library.octavo_linear(ctypes.byref(args)))
        return out

    def _quantized_linear(
        self, inputs: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        assert inputs.dtype == torch.float32 and inputs.shape[1] == weight.in_features
        out = torch.empty((inputs.shape[0], weight.out_features))
        args = QuantizedLinearArgs(
            weight=quantized_weight_args(weight, bias),
            inputs=inputs.data_ptr(),
            out=out.data_ptr(),
            num_rows=inputs.shape[0],
            input_stride=inputs.stride(0),
            instruction_set=self._instruction_set_code,
            num_threads=torch.get_num_threads(),
        )
        check_status(self._library.octavo_quantized_linear(ctypes.byref(args)))
        return out

    def embed(self, ids: torch.Tensor, weight: torch.Tensor | QuantizedWeight, factor: float = 1.0) -> torch.Tensor:
        """Rows of a token embedding times `factor`.

        Args:
            ids: [num_tokens] int64.
            weight: [vocab_size, hidden_size].
            factor: multiplies every value.

        Returns:
            [num_tokens, hidden_size], of a quantised weight in float32.

        Raises:
            ValueError: an id is not below vocab_size.
        """
        if not isinstance(weight, QuantizedWeight):
            return embed_rows(ids, weight, factor)
        assert ids.dtype == torch.int64
        out = torch.empty((ids.shape[0], weight.in_features))
        args = EmbedArgs(
            weight=quantized_weight_args(weight, None),
            ids=_pointer(ids),
            out=out.data_ptr(),
            num_rows=ids.shape[0],
            factor=factor,
            instruction_set=self._instruction_set_code,
            num_threads=torch.get_num_threads(),
        )
        check_status(self._library.octavo_embed(ctypes.byref(args)))
        return out

    def rms_norm(self, inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """X / sqrt(mean(x^2) + eps) * weight."""
        return self._rms_norm(inputs, None, None, weight, eps)

    def add_rms_norm(
        self, inputs: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of inputs + residual, and that sum."""
        total = torch.empty_like(residual)
        return self._rms_norm(inputs, residual, total, weight, eps), total

    def _rms_norm(
        self,
        inputs: torch.Tensor,  # [num_rows, hidden_size]
        residual: torch.Tensor | None,  # the same
        total: torch.Tensor | None,  # the same, written
        weight: torch.Tensor,  # [hidden_size] float32
        eps: float,
    ) -> torch.Tensor:  # [num_rows, hidden_size]
        num_rows, size = inputs.shape
        assert weight.shape == (size,) and weight.dtype == torch.float32
        assert residual is None or (residual.shape == inputs.shape and residual.dtype == inputs.dtype)
        out = torch.empty_like(inputs)
        args = RmsNormArgs(
            inputs=_pointer(inputs),
            residual=None if residual is None else _pointer(residual),
            weight=_pointer(weight),
            out=_pointer(out),
            total=None if total is None else _pointer(total),
            num_rows=num_rows,
            size=size,
            eps=eps,
            element_type=element_type(inputs.dtype),
            instruction_set=self._instruction_set_code,
            num_threads=torch.get_num_threads(),
        )
        check_status(self._library.octavo_rms_norm(ctypes.byref(args)))
        return out

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(first half) * second half."""
        num_rows, width = gate_up.shape
        out = torch.empty((num_rows, width // 2), dtype=gate_up.dtype)
        args = GateArgs(
            gate_up=_pointer(gate_up),
            out=out.data_ptr(),
            num_rows=num_rows,
            size=width // 2,
            activation=ACTIVATIONS[activation],
            element_type=element_type(gate_up.dtype),
            instruction_set=self._instruction_set_code,
            num_threads=torch.get_num_threads(),
        )
        check_status(self._library.octavo_gate(ctypes.byref(args)))
        return out

    def rotary_angles(
        self, positions: torch.Tensor, inverse_frequencies: torch.Tensor, magnitude: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of position times frequency, times the magnitude."""
        assert positions.dtype == torch.int64 and inverse_frequencies.dtype == torch.float32
        shape = (positions.shape[0], inverse_frequencies.shape[0])
        cos, sin = torch.empty(shape), torch.empty(shape)
        args = RotaryAnglesArgs(
            positions=_pointer(positions),
            inverse_frequencies=_pointer(inverse_frequencies),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            num_tokens=shape[0],
            size=shape[1],
            magnitude=magnitude,
            instruction_set=self._instruction_set_code,
            num_threads=torch.get_num_threads(),
        )
        check_status(self._library.octavo_rotary_angles(ctypes.byref(args)))
        return cos, sin

    def soft_cap(self, scores: torch.Tensor, cap: float) -> torch.Tensor:
        """Cap * tanh(scores / cap)."""
        assert scores.dtype == torch.float32
        out = torch.empty_like(scores)
        size = scores.shape[-1]
        args = SoftCapArgs(
            scores=_pointer(scores),
            out=_pointer(out),
            num_rows=scores.numel() // size if size else 0,
            size=size,
            cap=cap,
            instruction_set=self._instruction_set_code,
            num_threads=torch.get_num_threads(),
        )
        check_status(self._library.octavo_soft_cap(ctypes.byref(args)))
        return out

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Choose one token for each row."""
        return self._sampler.sample(logits, batch)

    def token_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor | None, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities of some tokens and of each row's best."""
        return self._sampler.token_logprobs(logits, token_ids, num_top)


def quantized_weight_args(weight: QuantizedWeight, bias: torch.Tensor | None) -> QuantizedWeightArgs:
    """Where a weight and its bias lie; both must outlive what is returned."""
    assert bias is None or (bias.shape == (weight.out_features,) and bias.dtype == torch.float32)
    return QuantizedWeightArgs(
        codes=_pointer(weight.codes),
        scales=_pointer(weight.scales),
        minimums=None if weight.minimums is None else _pointer(weight.minimums),
        bias=None if bias is None else _pointer(bias),
        num_outputs=weight.out_features,
        in_features=weight.in_features,
        num_scales=weight.scales.shape[1],
    )


def _pointer(x: torch.Tensor) -> int:
    assert x.is_contiguous() and x.device.type == "cpu"
    return x.data_ptr()
