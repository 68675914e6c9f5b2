"""GGUF files both ways for the tests: a transformers model out of a file, and a file out of a transformers model.

Names come from the map of the `gguf` package, so that ours are checked against it.
"""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

from models.gguf_file import GGUFFile

ARCHS = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}


def gguf_name(model: transformers.PreTrainedModel, name: str) -> str:
    """What the converter calls a parameter."""
    arch = ARCHS[model.config.model_type]
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def interleave(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """The converter's order of the rows of llama's query and key: element i of each half side by side."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    order = np.arange(head_dim).reshape(2, head_dim // 2).T.flatten()
    return heads[:, order].reshape(rows.shape)


def deinterleave(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Undo `interleave`."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    order = np.arange(head_dim).reshape(head_dim // 2, 2).T.flatten()
    return heads[:, order].reshape(rows.shape)


def to_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    type_of: Callable[[str], gguf.GGMLQuantizationType] = lambda name: gguf.GGMLQuantizationType.F32,
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write the model as llama.cpp's converter would. The model's weights become what the file holds, dequantised.

    Args:
        model: of one of ARCHS.
        path: the file.
        type_of: the type of a matrix, by its GGUF name; vectors are F32.
        edit: adds to the file.
    """
    config = model.config
    arch = ARCHS[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_bos_token_id(config.bos_token_id)
    gemma = config.model_type == "gemma3_text"
    rope = config.rope_parameters["full_attention"] if gemma else config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if gemma:
        writer.add_sliding_window(config.sliding_window)
    edit(writer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            target = gguf_name(model, name)
            values = parameter.numpy().astype(np.float32)
            permuted = config.model_type == "llama" and (".attn_q." in target or ".attn_k." in target)
            if permuted:
                values = interleave(values, head_dim)
            if gemma and "norm" in name:
                values = values + 1
            kind = type_of(target) if values.ndim == 2 else gguf.GGMLQuantizationType.F32
            data = gguf.quants.quantize(values, kind)
            writer.add_tensor(target, data, raw_dtype=kind)
            if values.ndim == 2:
                kept = gguf.quants.dequantize(data, kind).reshape(values.shape)
                parameter.copy_(torch.from_numpy(deinterleave(kept, head_dim) if permuted else kept.copy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def from_gguf(
    model_class: type[transformers.PreTrainedModel], config: transformers.PreTrainedConfig, path: Path
) -> transformers.PreTrainedModel:
    """A transformers model with the weights of a file, dequantised by the `gguf` package."""
    file = GGUFFile(path)
    raw = np.memmap(path, dtype=np.uint8, mode="c")
    unread = set(file.tensors)
    weights: dict[str, torch.Tensor] = {}
    with torch.device("meta"):
        skeleton = model_class(config)
    for name, _ in skeleton.named_parameters():
        tensor = file.tensors[gguf_name(skeleton, name)]
        unread.remove(tensor.name)
        data = raw[tensor.offset : tensor.offset + tensor.num_bytes].reshape(1, -1)
        values = gguf.quants.dequantize(data, tensor.type).reshape(tensor.shape)
        if config.model_type == "llama" and (".attn_q." in tensor.name or ".attn_k." in tensor.name):
            values = deinterleave(values, config.head_dim)
        if config.model_type == "gemma3_text" and "norm" in name:
            values = values - 1
        weights[name] = torch.from_numpy(np.ascontiguousarray(values))
    assert not unread
    return model_class.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32).eval()
