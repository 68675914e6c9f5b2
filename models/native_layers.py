"""Hands a decoder's layers to the native CPU library, which then runs all of them in one call.

The one place that knows both the modules of a layer and what the native call wants of them.
"""

from torch import nn

from kernels.model_ops.native_layers import DecoderLayerTensors, DecoderShape, NativeLayers, QuantizedLinear
from kernels.model_ops.native_ops import NativeOps
from kernels.quantized_weight import QuantizedWeight
from models.decoder import Decoder, DecoderLayer
from models.layers import Linear, RMSNorm


def native_layers(decoder: Decoder) -> NativeLayers | None:
    """The layers of a decoder with its weights loaded; None where they are run one operation at a time.

    That is where the operations are not the native ones, some weight is not quantised, or windows differ: the native
    call plans attention once for all layers that have one.
    """
    if not isinstance(decoder.ops, NativeOps):
        return None
    layers = []
    for layer, rope in zip(decoder.layers, decoder.rope_of_layer, strict=True):
        tensors = _tensors(layer, rope)
        if tensors is None:
            return None
        layers.append(tensors)
    if len({layer.sliding_window for layer in layers} - {None}) > 1:
        return None
    config = decoder.config
    shape = DecoderShape(
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        attention_scale=config.attention_scale,
        logit_softcap=config.attn_logit_softcap,
        activation=config.activation,
        norm_eps=config.rms_norm_eps,
    )
    return NativeLayers(layers, decoder.norm.weight, shape)


def _tensors(layer: DecoderLayer, rope: int) -> DecoderLayerTensors | None:
    attention, mlp = layer.attention, layer.mlp
    matrices = [_quantized(linear) for linear in (attention.qkv, attention.output, mlp.gate_up, mlp.down)]
    if None in matrices:
        return None
    return DecoderLayerTensors(
        *matrices,
        attention_norm=layer.attention_norm.weight,
        mlp_norm=layer.mlp_norm.weight,
        attention_output_norm=_norm_weight(layer.attention_output_norm),
        mlp_output_norm=_norm_weight(layer.mlp_output_norm),
        head_norm=None if attention.qk_norm is None else attention.qk_norm.weight,
        rope=rope,
        sliding_window=attention.params.sliding_window,
    )


def _quantized(linear: Linear) -> QuantizedLinear | None:
    return QuantizedLinear(linear.weight, linear.bias) if isinstance(linear.weight, QuantizedWeight) else None


def _norm_weight(norm: nn.Module) -> nn.Parameter | None:
    return norm.weight if isinstance(norm, RMSNorm) else None
