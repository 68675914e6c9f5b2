"""The parts of a decoder layer: linear, RMS norm, attention and MLP, each with the slots its weights are loaded into.

Every matrix product goes through `Linear`. Knows no file format; the names in slots are those of Hugging Face.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from kernels.attention.backend import AttentionBackend
from kernels.attention.metadata import AttentionMetadata, AttentionParams, KVLayer
from models.config import ModelConfig
from models.rope import rotate


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
        tied_weight: nn.Parameter | None = None,  # [out, in], to share instead of holding one
    ) -> None:
        """Hold one weight for projections of `out_features` each."""
        super().__init__()
        self.out_features = tuple(out_features)
        rows = sum(self.out_features)
        if tied_weight is None:
            tied_weight = frozen_parameter(rows, in_features, dtype=dtype, device=device)
        self.weight = tied_weight
        self.bias = frozen_parameter(rows, dtype=dtype, device=device) if bias else None  # [out]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[num_tokens, in_features] to [num_tokens, sum(out_features)]."""
        return functional.linear(inputs, self.weight, self.bias)

    def slots(self, *names: str) -> Slots:
        """The slots of the projections, by their names without `.weight` and `.bias`."""
        slots: Slots = {}
        start = 0
        for name, rows in zip(names, self.out_features, strict=True):
            weight = self.weight[start : start + rows]
            slots[f"{name}.weight"] = WeightSlot(tuple(weight.shape), weight)
            if self.bias is not None:
                slots[f"{name}.bias"] = WeightSlot((rows,), self.bias[start : start + rows])
            start += rows
        return slots


class RMSNorm(nn.Module):
    """x / rms(x) * w over the last dimension, in float32 whatever the dtype of x; w stays in float32."""

    def __init__(self, *shape: int, eps: float, offset: float, device: torch.device) -> None:
        """Norm over the last of `shape`; a second dimension is one weight vector for each head.

        `offset` is added to the checkpoint's weights.
        """
        super().__init__()
        self.weight = frozen_parameter(*shape, dtype=torch.float32, device=device)
        self.eps = eps
        self.offset = offset

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Any shape that ends in the weight's shape; the dtype is kept."""
        size = self.weight.shape[-1]
        if self.weight.dim() == 1:
            return functional.rms_norm(inputs.float(), (size,), self.weight, self.eps).to(inputs.dtype)
        return (functional.rms_norm(inputs.float(), (size,), None, self.eps) * self.weight).to(inputs.dtype)

    def slots(self, name: str, rows: slice | None = None) -> Slots:
        """The slot of the weight, or of one vector broadcast to `rows` of it."""
        destination = self.weight if rows is None else self.weight[rows]
        return {f"{name}.weight": WeightSlot(self.weight.shape[-1:], destination, self.offset)}


class Attention(nn.Module):
    """Projections, head norms and rotary embedding around one call of the attention backend."""

    def __init__(self, config: ModelConfig, params: AttentionParams, dtype: torch.dtype, device: torch.device) -> None:
        """Build with uninitialised weights."""
        super().__init__()
        self.params = params
        self.head_dim = config.head_dim
        self.head_split = (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)
        sizes = [heads * config.head_dim for heads in self.head_split]
        self.qkv = Linear(config.hidden_size, sizes, config.qkv_bias, dtype, device)
        self.output = Linear(sizes[0], [config.hidden_size], config.o_bias, dtype, device)
        self.qk_norm: RMSNorm | None = None
        if config.qk_norm:
            num_normed = config.num_q_heads + config.num_kv_heads
            self.qk_norm = RMSNorm(
                num_normed, config.head_dim, eps=config.rms_norm_eps, offset=config.norm_weight_offset, device=device
            )

    def forward(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size]
        angles: tuple[torch.Tensor, torch.Tensor],  # [num_tokens, 1, head_dim / 2] each
        backend: AttentionBackend,
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        """Write this step's keys and values, then attend."""
        num_q, num_kv, _ = self.head_split
        heads = self.qkv(hidden).unflatten(-1, (-1, self.head_dim))  # [num_tokens, num_q + 2 * num_kv, head_dim]
        # Queries and keys go through norm and rotation as one tensor: half the number of small kernels.
        query_key, value = heads.split((num_q + num_kv, num_kv), dim=1)
        if self.qk_norm is not None:
            query_key = self.qk_norm(query_key)
        query, key = rotate(query_key, *angles).split((num_q, num_kv), dim=1)
        backend.write_kv(key, value, kv_layer, metadata)
        attended = backend.attend(query, kv_layer, metadata, self.params)
        return self.output(attended.flatten(1))

    def slots(self, prefix: str) -> Slots:
        """The slots of the projections and head norms."""
        slots = self.qkv.slots(*(f"{prefix}.{name}_proj" for name in "qkv"))
        slots |= self.output.slots(f"{prefix}.o_proj")
        if self.qk_norm is not None:
            num_q = self.head_split[0]
            slots |= self.qk_norm.slots(f"{prefix}.q_norm", slice(0, num_q))
            slots |= self.qk_norm.slots(f"{prefix}.k_norm", slice(num_q, None))
        return slots


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Build with uninitialised weights."""
        super().__init__()
        size = config.intermediate_size
        self.gate_up = Linear(config.hidden_size, [size, size], config.mlp_bias, dtype, device)
        self.down = Linear(size, [config.hidden_size], config.mlp_bias, dtype, device)
        self.gelu = config.activation == "gelu_tanh"

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same."""
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        activated = functional.gelu(gate, approximate="tanh") if self.gelu else functional.silu(gate)
        return self.down(activated * up)

    def slots(self, prefix: str) -> Slots:
        """The slots of the three projections."""
        return self.gate_up.slots(f"{prefix}.gate_proj", f"{prefix}.up_proj") | self.down.slots(f"{prefix}.down_proj")
