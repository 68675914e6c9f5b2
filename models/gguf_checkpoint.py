"""The weights of a GGUF file, under the names and in the layout that the decoder expects.

Knows llama.cpp's tensor names and what its converter does to weights. Must not know the container (see gguf_file).
"""

from collections.abc import Iterator

import torch

from models.config import ModelConfig
from models.errors import UnsupportedModelError
from models.gguf_blocks import CODE_BITS, coded_rows
from models.gguf_file import GGUFFile, can_dequantize
from models.quantization import CodedRows

_GLOBAL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_SANDWICH_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# Rotary frequencies: the first is read into the configuration, the second is recomputed from it.
_NOT_WEIGHTS = ("rope_freqs.weight", "attn_rot_embd.weight")


class GGUFCheckpoint:
    """All weights of a GGUF file, by the names in it."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        """Wrap an open file. Raises UnsupportedModelError for a tensor type that cannot be dequantised."""
        self.path = file.path
        self.files = [file.path]
        self._file = file
        self._head_dim = config.head_dim
        self._layer_names = _LAYER_NAMES | (_SANDWICH_NAMES if config.sandwich_norms else {})
        # llama.cpp rotates adjacent elements in this architecture; its converter reorders the rows of queries and keys.
        self._interleaved = config.family == "llama"
        self.shapes = {name: tensor.shape for name, tensor in file.tensors.items() if not name.endswith(_NOT_WEIGHTS)}
        unsupported = {t.type for t in file.tensors.values() if not can_dequantize(t.type)}
        for name in self.shapes:
            if file.tensors[name].type in unsupported:
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name} is of type {file.tensors[name].type.name}, "
                    "which the gguf package does not dequantise"
                )

    def source_name(self, name: str) -> str:
        """The name in the file of the weight that the decoder calls `name`."""
        module, _, suffix = name.rpartition(".")
        if module in _GLOBAL_NAMES:
            return f"{_GLOBAL_NAMES[module]}.{suffix}"
        index, _, part = module.removeprefix("model.layers.").partition(".")
        return f"blk.{index}.{self._layer_names[part]}.{suffix}"

    def num_bytes(self, source_name: str) -> int:
        """Bytes of the tensor in the file."""
        return self._file.tensors[source_name].num_bytes

    def pieces(self, source_name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Dequantised float32 rows of the tensor, piece by piece, with the number of the first row of each."""
        for start, values in self._file.pieces(source_name, self._head_dim):
            yield start, self._in_order(source_name, torch.from_numpy(values))

    def code_bits(self, source_name: str) -> frozenset[int]:
        """The bits of the codes that the tensor can be given in without a loss."""
        return CODE_BITS.get(self._file.tensors[source_name].type, frozenset())

    def coded_pieces(self, source_name: str, bits: int) -> Iterator[tuple[int, CodedRows]]:
        """Codes of the tensor's rows, piece by piece, with the number of the first row of each."""
        tensor = self._file.tensors[source_name]
        for start, data in self._file.byte_pieces(source_name, self._head_dim):
            rows = coded_rows(data, tensor.type, tensor.shape[1], bits)
            minimums = None if rows.minimums is None else self._in_order(source_name, rows.minimums)
            codes, scales = (self._in_order(source_name, part) for part in (rows.codes, rows.scales))
            yield start, CodedRows(codes, scales, minimums)

    def _in_order(self, source_name: str, rows: torch.Tensor) -> torch.Tensor:
        """Whole heads of the tensor's rows, or a vector, in the order that the decoder expects."""
        is_rotated = ".attn_q." in source_name or ".attn_k." in source_name
        return _half_rotation_order(rows, self._head_dim) if self._interleaved and is_rotated else rows


def _half_rotation_order(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Within each head, bring pairs (2i, 2i + 1) to (i, i + head_dim / 2)."""
    pairs = rows.unflatten(0, (-1, head_dim // 2, 2))  # [num_heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).flatten(0, 2)
