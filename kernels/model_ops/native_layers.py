"""All layers of a decoder with quantised weights in one call of the native CPU library.

Turns tensors into pointers and sizes; the arithmetic is in kernels/cpu, the same as of single operations, so that
hidden states are bitwise those of calling them one by one. Knows no model families but by which parts are None.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.attention.cpu import CpuBackend, cache_fields
from kernels.attention.metadata import AttentionMetadata, KVLayer
from kernels.cpu.native_library import (
    ACTIVATIONS,
    INSTRUCTION_SETS,
    LAYER_PARTS,
    AttendArgs,
    DecoderArgs,
    LayerCache,
    LayerWeights,
    RotateAndWriteArgs,
    check_status,
    element_type,
    load_library,
)
from kernels.model_ops.native_ops import quantized_weight_args
from kernels.model_ops.ops import Activation
from kernels.quantized_weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """A matrix and its bias."""

    weight: QuantizedWeight  # [out_features, in_features]
    bias: torch.Tensor | None  # [out_features] float32


@dataclass(frozen=True, slots=True)
class DecoderLayerTensors:
    """What one layer computes with; norms are float32 and contiguous."""

    qkv: QuantizedLinear  # out: [num_q_heads + 2 * num_kv_heads, head_dim]
    output: QuantizedLinear
    gate_up: QuantizedLinear  # out: [2, intermediate_size]
    down: QuantizedLinear
    attention_norm: torch.Tensor  # [hidden_size]
    mlp_norm: torch.Tensor  # [hidden_size]
    attention_output_norm: torch.Tensor | None  # [hidden_size], of what attention adds
    mlp_output_norm: torch.Tensor | None  # [hidden_size], of what the MLP adds
    head_norm: torch.Tensor | None  # [num_q_heads + num_kv_heads, head_dim]
    rope: int  # which of the angles
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What all layers share."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    logit_softcap: float | None
    activation: Activation
    norm_eps: float


class NativeLayers:
    """Runs the layers of one decoder, on torch's own threads, whose number changes no result."""

    def __init__(self, layers: Sequence[DecoderLayerTensors], final_norm: torch.Tensor, shape: DecoderShape) -> None:
        """Note where the weights lie; they are neither copied nor changed.

        Args:
            layers: of the decoder, in order.
            final_norm: [hidden_size] float32, after the last layer.
            shape: of every layer.

        Raises:
            NativeLibraryError: the library is not built or does not load.
        """
        self._library = load_library()
        self._tensors = (tuple(layers), final_norm)  # what the pointers lead to
        self._weights = (LayerWeights * len(layers))(*map(_layer_weights, layers))
        self._final_norm = final_norm
        self._shape = shape
        self._seconds: ctypes.Array[ctypes.c_double] | None = None
        self._caches: tuple[list[KVLayer], ctypes.Array[LayerCache]] | None = None

    def run(
        self,
        residual: torch.Tensor,  # [num_tokens, hidden_size] float32
        angles: Sequence[tuple[torch.Tensor, torch.Tensor]],  # one or two pairs of [num_tokens, head_dim / 2] float32
        backend: CpuBackend,
        kv_layers: list[KVLayer],
        metadata: AttentionMetadata,
        wanted: torch.Tensor | None = None,  # [num_wanted] int64, ascending
    ) -> torch.Tensor:  # [num_tokens, hidden_size] float32
        """Run all layers and the final norm, and write this step's keys and values.

        Of tokens that are not `wanted` the hidden states are left out, and their rows are arbitrary; None = all are.

        Where `measure` was called, the time of each part is added up.

        Raises:
            ValueError: the metadata do not fit the cache, or its dtype is not supported.
            MemoryError: there is no room for the activations.
        """
        num_tokens, hidden_size = residual.shape
        assert residual.is_contiguous() and residual.dtype == torch.float32
        assert metadata.slot_mapping.shape[0] == num_tokens
        for cos, sin in angles:
            assert cos.shape == sin.shape == (num_tokens, self._shape.head_dim // 2)
            assert cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype == torch.float32
        assert wanted is None or (wanted.dtype == torch.int64 and wanted.is_contiguous())
        out = torch.empty_like(residual)
        write, attend = (
            self._write_args(backend, kv_layers[0], metadata),
            self._attend_args(backend, kv_layers[0], metadata),
        )
        args = DecoderArgs(
            layers=self._weights,
            caches=self._cache_pointers(kv_layers),
            final_norm=self._final_norm.data_ptr(),
            residual=residual.data_ptr(),
            wanted=None if wanted is None else wanted.data_ptr(),
            out=out.data_ptr(),
            cos=tuple(cos.data_ptr() for cos, _ in angles),
            sin=tuple(sin.data_ptr() for _, sin in angles),
            write=write,
            attend=attend,
            seconds=None if self._seconds is None else ctypes.addressof(self._seconds),
            num_layers=len(self._weights),
            num_tokens=num_tokens,
            num_wanted=num_tokens if wanted is None else wanted.shape[0],
            hidden_size=hidden_size,
            intermediate_size=self._weights[0].down.in_features,
            eps=self._shape.norm_eps,
            activation=ACTIVATIONS[self._shape.activation],
            instruction_set=INSTRUCTION_SETS[backend.instruction_set],
            num_threads=torch.get_num_threads(),
        )
        check_status(self._library.octavo_run_layers(ctypes.byref(args)))
        return out

    def measure(self) -> None:
        """Begin to add up how long each part of the layers takes, from zero."""
        self._seconds = (ctypes.c_double * len(LAYER_PARTS))()

    def part_seconds(self) -> dict[str, float]:
        """Seconds of each part, in all layers of all steps since `measure` was called."""
        assert self._seconds is not None, "nothing is measured before measure()"
        return dict(zip(LAYER_PARTS, self._seconds, strict=True))

    def _cache_pointers(self, kv_layers: list[KVLayer]) -> "ctypes.Array[LayerCache]":
        """Where the caches of all layers lie, found once for each cache."""
        if self._caches is None or self._caches[0] is not kv_layers:
            pointers = [
                LayerCache(
                    *(
                        None if part is None else part.data_ptr()
                        for part in (kv.key, kv.value, kv.key_scale, kv.value_scale)
                    )
                )
                for kv in kv_layers
            ]
            self._caches = (kv_layers, (LayerCache * len(pointers))(*pointers))
        return self._caches[1]

    def _write_args(self, backend: CpuBackend, kv_layer: KVLayer, metadata: AttentionMetadata) -> RotateAndWriteArgs:
        """What does not differ between layers."""
        shape = self._shape
        num_blocks, _, block_size, _ = kv_layer.key.shape
        num_heads = shape.num_q_heads + 2 * shape.num_kv_heads
        return RotateAndWriteArgs(
            **cache_fields(kv_layer),
            slot_mapping=metadata.slot_mapping.data_ptr(),
            num_tokens=metadata.slot_mapping.shape[0],
            num_q_heads=shape.num_q_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            heads_strides=(num_heads * shape.head_dim, shape.head_dim),
            norm_eps=shape.norm_eps,
            heads_type=element_type(torch.float32),
            query_type=element_type(backend.query_dtype(torch.float32, kv_layer)),
            instruction_set=INSTRUCTION_SETS[backend.instruction_set],
        )

    def _attend_args(self, backend: CpuBackend, kv_layer: KVLayer, metadata: AttentionMetadata) -> AttendArgs:
        """What does not differ between layers."""
        shape = self._shape
        num_blocks, _, block_size, _ = kv_layer.key.shape
        tables = metadata.block_tables
        return AttendArgs(
            **cache_fields(kv_layer),
            query_start_loc=metadata.query_start_loc.data_ptr(),
            seq_lens=metadata.seq_lens.data_ptr(),
            block_tables=tables.data_ptr(),
            num_rows=metadata.seq_lens.shape[0],
            num_tokens=metadata.slot_mapping.shape[0],
            num_q_heads=shape.num_q_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            block_tables_width=tables.shape[1],
            block_tables_stride=tables.stride(0),
            query_strides=(shape.num_q_heads * shape.head_dim, shape.head_dim),
            scale=shape.attention_scale,
            logit_softcap=shape.logit_softcap or 0.0,
            query_type=element_type(backend.query_dtype(torch.float32, kv_layer)),
            out_type=element_type(torch.float32),
            instruction_set=INSTRUCTION_SETS[backend.instruction_set],
            num_threads=torch.get_num_threads(),
        )


def _layer_weights(layer: DecoderLayerTensors) -> LayerWeights:
    norms = ("attention_norm", "mlp_norm", "attention_output_norm", "mlp_output_norm", "head_norm")
    matrices = ("qkv", "output", "gate_up", "down")
    return LayerWeights(
        **{name: quantized_weight_args(getattr(layer, name).weight, getattr(layer, name).bias) for name in matrices},
        **{name: _norm_pointer(getattr(layer, name)) for name in norms},
        rope=layer.rope,
        sliding_window=layer.sliding_window or 0,
    )


def _norm_pointer(weight: torch.Tensor | None) -> int | None:
    assert weight is None or (weight.is_contiguous() and weight.dtype == torch.float32)
    return None if weight is None else weight.data_ptr()
