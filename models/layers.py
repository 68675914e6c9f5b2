"""The parts of a decoder layer: linear, RMS norm, attention and MLP, each with the slots its weights are loaded into.

Every matrix product goes through `Linear`. Knows no file format; the names in slots are those of Hugging Face.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from kernels.attention.backend import AttentionBackend
from kernels.attention.metadata import AttentionMetadata, AttentionParams, KVLayer, Rotation
from kernels.model_ops.ops import ModelOps
from kernels.quantized_weight import QuantizedWeight
from models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where one tensor of a checkpoint goes: part of a parameter, often of a fused one."""

    shape: tuple[int, ...]  # what the checkpoint must hold
    destination: torch.Tensor  # a view of the parameter that a tensor of `shape` broadcasts to
    offset: float = 0.0  # added to every value

    def write(self, start_row: int, piece: torch.Tensor) -> None:
        """Store rows from `start_row` on, converted to the parameter's dtype and device. A vector comes whole."""
        rows = self.destination if piece.dim() < 2 else self.destination[start_row : start_row + len(piece)]
        rows.copy_(piece if self.offset == 0.0 else piece.to(rows.dtype) + self.offset)


Slots = dict[str, WeightSlot]


@dataclass(frozen=True, slots=True)
class FusedWeight:
    """One matrix and the tensors of a checkpoint that lie in it end to end, by their Hugging Face names."""

    names: tuple[str, ...]
    shape: tuple[int, ...]  # [out_features, in_features]
    replace: Callable[[QuantizedWeight], None]  # puts codes in the place of the floats


def frozen_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """x W^T + b. The outputs may be those of several projections of the checkpoint, laid end to end."""

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        ops: ModelOps,
        tied_weight: nn.Parameter | None = None,  # [out, in], to share instead of holding one
    ) -> None:
        """Hold one weight for projections of `out_features` each."""
        super().__init__()
        self.out_features = tuple(out_features)
        rows = sum(self.out_features)
        if tied_weight is None:
            tied_weight = frozen_parameter(rows, in_features, dtype=dtype, device=device)
        self.weight: nn.Parameter | QuantizedWeight = tied_weight
        self.bias = frozen_parameter(rows, dtype=dtype, device=device) if bias else None  # [out]
        self.ops = ops

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[num_tokens, in_features] to [num_tokens, sum(out_features)]."""
        return self.ops.linear(inputs, self.weight, self.bias)

    def slots(self, *names: str) -> Slots:
        """The slots of the projections, by their names without `.weight` and `.bias`."""
        assert isinstance(self.weight, nn.Parameter), "a quantised weight has no slots"
        slots: Slots = {}
        start = 0
        for name, rows in zip(names, self.out_features, strict=True):
            weight = self.weight[start : start + rows]
            slots[f"{name}.weight"] = WeightSlot(tuple(weight.shape), weight)
            if self.bias is not None:
                slots[f"{name}.bias"] = WeightSlot((rows,), self.bias[start : start + rows])
            start += rows
        return slots

    def fused_weight(self, *names: str) -> FusedWeight:
        """The weight as one, by the names of the projections without `.weight`."""
        assert isinstance(self.weight, nn.Parameter), "it is quantised once"
        shape = tuple(self.weight.shape)
        return FusedWeight(tuple(f"{name}.weight" for name in names), shape, self.quantize_to)

    def quantize_to(self, weight: QuantizedWeight) -> None:
        """Compute with `weight` from now on, and let the floats go."""
        del self.weight
        self.weight = weight


class RMSNorm(nn.Module):
    """x / rms(x) * w over the last dimension, in float32 whatever the dtype of x; w stays in float32."""

    def __init__(self, *shape: int, eps: float, offset: float, ops: ModelOps, device: torch.device) -> None:
        """Norm over the last of `shape`; a second dimension is one weight vector for each head.

        `offset` is added to the checkpoint's weights.
        """
        super().__init__()
        self.weight = frozen_parameter(*shape, dtype=torch.float32, device=device)
        self.eps = eps
        self.offset = offset
        self.ops = ops

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same; the dtype is kept."""
        return self.ops.rms_norm(inputs, self.weight, self.eps)

    def add(self, inputs: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of inputs + residual, and that sum; all [num_tokens, hidden_size]."""
        return self.ops.add_rms_norm(inputs, residual, self.weight, self.eps)

    def slots(self, name: str, rows: slice | None = None) -> Slots:
        """The slot of the weight, or of one vector broadcast to `rows` of it."""
        destination = self.weight if rows is None else self.weight[rows]
        return {f"{name}.weight": WeightSlot(self.weight.shape[-1:], destination, self.offset)}


class Attention(nn.Module):
    """Projections, head norms and rotary embedding around one call of the attention backend."""

    def __init__(
        self, config: ModelConfig, params: AttentionParams, dtype: torch.dtype, device: torch.device, ops: ModelOps
    ) -> None:
        """Build with uninitialised weights."""
        super().__init__()
        self.params = params
        self.head_dim = config.head_dim
        self.head_split = (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)
        sizes = [heads * config.head_dim for heads in self.head_split]
        self.qkv = Linear(config.hidden_size, sizes, config.qkv_bias, dtype, device, ops)
        self.output = Linear(sizes[0], [config.hidden_size], config.o_bias, dtype, device, ops)
        self.qk_norm: RMSNorm | None = None
        if config.qk_norm:
            num_normed = config.num_q_heads + config.num_kv_heads
            self.qk_norm = RMSNorm(
                num_normed,
                config.head_dim,
                eps=config.rms_norm_eps,
                offset=config.norm_weight_offset,
                ops=ops,
                device=device,
            )

    def forward(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size]
        angles: tuple[torch.Tensor, torch.Tensor],  # [num_tokens, head_dim / 2] float32 each
        backend: AttentionBackend,
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        """Write this step's keys and values, then attend."""
        heads = self.qkv(hidden).unflatten(-1, (-1, self.head_dim))  # [num_tokens, num_q + 2 * num_kv, head_dim]
        if self.qk_norm is None:
            rotation = Rotation(*angles)
        else:
            rotation = Rotation(*angles, self.qk_norm.weight, self.qk_norm.eps)
        query = backend.rotate_and_write(heads, rotation, kv_layer, metadata)
        attended = backend.attend(query, kv_layer, metadata, self.params)
        return self.output(attended.flatten(1))

    def slots(self, prefix: str) -> Slots:
        """The slots of the projections and head norms."""
        slots = self.qkv.slots(*_qkv_names(prefix))
        slots |= self.output.slots(f"{prefix}.o_proj")
        if self.qk_norm is not None:
            num_q = self.head_split[0]
            slots |= self.qk_norm.slots(f"{prefix}.q_norm", slice(0, num_q))
            slots |= self.qk_norm.slots(f"{prefix}.k_norm", slice(num_q, None))
        return slots

    def fused_weights(self, prefix: str) -> list[FusedWeight]:
        """The two matrices."""
        return [self.qkv.fused_weight(*_qkv_names(prefix)), self.output.fused_weight(f"{prefix}.o_proj")]


def _qkv_names(prefix: str) -> list[str]:
    return [f"{prefix}.{name}_proj" for name in "qkv"]


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, ops: ModelOps) -> None:
        """Build with uninitialised weights."""
        super().__init__()
        size = config.intermediate_size
        self.gate_up = Linear(config.hidden_size, [size, size], config.mlp_bias, dtype, device, ops)
        self.down = Linear(size, [config.hidden_size], config.mlp_bias, dtype, device, ops)
        self.activation = config.activation
        self.ops = ops

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same."""
        return self.down(self.ops.gate(self.gate_up(hidden), self.activation))

    def slots(self, prefix: str) -> Slots:
        """The slots of the three projections."""
        return self.gate_up.slots(f"{prefix}.gate_proj", f"{prefix}.up_proj") | self.down.slots(f"{prefix}.down_proj")

    def fused_weights(self, prefix: str) -> list[FusedWeight]:
        """The two matrices."""
        gate_up = self.gate_up.fused_weight(f"{prefix}.gate_proj", f"{prefix}.up_proj")
        return [gate_up, self.down.fused_weight(f"{prefix}.down_proj")]
