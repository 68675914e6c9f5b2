"""A decoder of float32 weights that have the values which are served, so that plain torch can compute with it.

For looking at a model beside the one that serves. Must not know what is looked at.
"""

from pathlib import Path

import torch
from torch import nn

from kernels.model_ops.torch_ops import TorchOps
from kernels.quantized_weight import QuantizedWeight
from models.config import ModelConfig
from models.config_reader import read_config
from models.decoder import Decoder
from models.layers import Linear
from models.loader import load_model
from models.memory import GIB, NotEnoughMemory, available_host_bytes
from models.packed_weights import PackedWeights
from models.quantization import Quantization

_CPU = torch.device("cpu")
_FLOAT_BYTES = 4
_CODE_BYTES = 1.25  # of a weight as 8-bit codes and scales, which lie in memory until all of them are floats


def load_float_decoder(
    path: Path, dtype: torch.dtype, quantization: Quantization, packed: PackedWeights | None, num_more_bytes: int
) -> Decoder:
    """Load the model at `path` with weights rounded as `dtype` and `quantization` say, and then kept in float32.

    Args:
        path: a Hugging Face directory or a .gguf file.
        dtype: that the weights are served in.
        quantization: that they are served with.
        packed: where rounded weights are kept between starts.
        num_more_bytes: of memory that must be left beside the weights.

    Raises:
        NotEnoughMemory: before anything is read, where the machine has too little.
        ModelError: the model cannot be loaded.
    """
    _check_memory(read_config(path), quantization, num_more_bytes)
    decoder = load_model(path, dtype, _CPU, TorchOps(), lambda _done, _total: None, quantization, packed)
    tied = decoder.embedding if decoder.config.tie_word_embeddings else None
    decoder.embedding = _in_float32(decoder.embedding)
    for module in decoder.modules():
        if isinstance(module, Linear):
            module.weight = decoder.embedding if module.weight is tied else _in_float32(module.weight)
            module.bias = None if module.bias is None else _in_float32(module.bias)
    return decoder


def _in_float32(weight: nn.Parameter | QuantizedWeight) -> nn.Parameter:
    values = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight.float()
    return nn.Parameter(values, requires_grad=False)


def _check_memory(config: ModelConfig, quantization: Quantization, num_more_bytes: int) -> None:
    outline = Decoder(config, torch.float32, torch.device("meta"), TorchOps())
    bytes_per_weight = _FLOAT_BYTES + (_CODE_BYTES if quantization != "none" else 0)
    needed = int(sum(parameter.numel() for parameter in outline.parameters()) * bytes_per_weight) + num_more_bytes
    available = available_host_bytes()
    if needed > available:
        raise NotEnoughMemory(
            f"A copy of the model in float32 takes {needed / GIB:.1f} GiB of memory, and {available / GIB:.1f} GiB "
            "are free. Free some, or look at a smaller model of the same family."
        )
