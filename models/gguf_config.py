"""Reads the metadata of a GGUF file into a ModelConfig.

Knows llama.cpp's metadata keys and what its loader assumes where one is absent. Must not know where weights go
(see gguf_checkpoint).
"""

import math
from collections.abc import Iterable
from typing import Any

from gguf.constants import GGMLQuantizationType

from models.config import (
    MAX_LAYERS,
    Family,
    LayerConfig,
    LinearScaling,
    ModelConfig,
    RopeParams,
    RopeScaling,
    YarnScaling,
    yarn_magnitude,
)
from models.errors import CheckpointError, ModelError, UnsupportedModelError
from models.gguf_file import GGUFFile

FAMILIES: dict[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}

# Control tokens that end a turn. A converter writes one end id, often that of a document; llama.cpp finds the others
# by their text, and a chat would run on without them.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")
_CONTROL_TOKEN = 3


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """The configuration of an open GGUF file.

    Raises:
        UnsupportedModelError: the architecture or a setting is not supported.
        ModelError: a key is missing or not of its kind.
        CheckpointError: a tensor that the configuration is read from is missing or misshapen.
    """
    keys = _Keys(file)
    family = _family(keys)
    if keys.integer("expert_count", 0):
        raise UnsupportedModelError(f"{file.path}: a mixture of experts; only dense models are supported")
    hidden_size = keys.integer("embedding_length")
    num_q_heads = keys.integer("attention.head_count")
    if num_q_heads < 1:
        raise ModelError(f"{file.path}: attention.head_count is {num_q_heads}")
    head_dim = _head_dim(keys, hidden_size // num_q_heads)
    gemma = family == "gemma3"
    tensors = file.tensors
    return ModelConfig(
        family=family,
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_q_heads=num_q_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_q_heads),
        head_dim=head_dim,
        max_position_embeddings=keys.integer("context_length"),
        layers=_layers(keys, family, head_dim),
        rms_norm_eps=keys.positive("attention.layer_norm_rms_epsilon"),
        attention_scale=_attention_scale(keys, family, hidden_size, num_q_heads, head_dim),
        eos_token_ids=_eos_token_ids(file),
        bos_token_id=_token_id(file, "bos"),
        activation="gelu_tanh" if gemma else "silu",
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm=family in ("qwen3", "gemma3"),
        sandwich_norms=gemma,
        # The converter has added Gemma's 1 to the norm weights and has not touched the embedding.
        norm_weight_offset=0.0,
        embedding_scale=hidden_size**0.5 if gemma else 1.0,
        attn_logit_softcap=keys.number("attn_logit_softcapping", 0.0) or None,
        final_logit_softcap=keys.number("final_logit_softcapping", 0.0) or None,
    )


def _family(keys: "_Keys") -> Family:
    if keys.arch not in FAMILIES:
        raise UnsupportedModelError(
            f"{keys.path}: general.architecture is {keys.arch!r}; supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[keys.arch]


def _head_dim(keys: "_Keys", default: int) -> int:
    head_dim = keys.integer("attention.key_length", default)
    value_dim = keys.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise UnsupportedModelError(f"{keys.path}: keys of {head_dim} and values of {value_dim} differ in length")
    rotated = keys.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModelError(
            f"{keys.path}: rope.dimension_count is {rotated} of {head_dim}; only whole heads are rotated"
        )
    return head_dim


def _vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding: it may be padded beyond the tokenizer's list, and vocab_size is optional."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} has no tensor token_embd.weight")
    return embedding.shape[0]


def _attention_scale(keys: "_Keys", family: Family, hidden_size: int, num_q_heads: int, head_dim: int) -> float:
    per_head = head_dim
    if family == "gemma3" and keys.integer("block_count") == 62:
        # Gemma 3 27B scales by hidden_size / num_heads (168) and has heads of 128. The file does not say so.
        per_head = hidden_size // num_q_heads
    return keys.positive("attention.scale", per_head**-0.5)


def _layers(keys: "_Keys", family: Family, head_dim: int) -> tuple[LayerConfig, ...]:
    num_layers = keys.integer("block_count")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise ModelError(f"{keys.path}: {keys.arch}.block_count is {num_layers}; it must be from 1 to {MAX_LAYERS}")
    theta = keys.positive("rope.freq_base", 10_000.0)
    rope = RopeParams(theta, _scaling(keys), _frequency_factors(keys.file, head_dim))
    window = keys.integer("attention.sliding_window", 0) or None
    if family != "gemma3":
        return (LayerConfig(rope, window),) * num_layers
    local_rope = RopeParams(keys.positive("rope.freq_base_swa", 10_000.0))
    pattern = keys.integer("attention.sliding_window_pattern", 6)
    if pattern < 1:
        raise ModelError(f"{keys.path}: attention.sliding_window_pattern is {pattern}")
    return tuple(
        LayerConfig(local_rope, window) if window and (i + 1) % pattern else LayerConfig(rope)
        for i in range(num_layers)
    )


def _scaling(keys: "_Keys") -> RopeScaling | None:
    kind = keys.text("rope.scaling.type", "none")
    factor = keys.positive("rope.scaling.factor", keys.positive("rope.scale_linear", 1.0))
    if kind in ("none", "linear"):
        # The key rope.scale_linear is older than rope.scaling.type.
        return None if factor == 1.0 or (kind == "none" and keys.has("rope.scaling.type")) else LinearScaling(factor)
    if kind != "yarn":
        raise UnsupportedModelError(f"{keys.path}: rope.scaling.type is {kind!r}; supported are none, linear and yarn")
    for name in ("yarn_ext_factor", "yarn_attn_factor"):
        if keys.number(f"rope.scaling.{name}", 1.0) != 1.0:
            raise UnsupportedModelError(f"{keys.path}: rope.scaling.{name} is not 1")
    return YarnScaling(
        factor,
        keys.integer("rope.scaling.original_context_length", keys.integer("context_length")),
        keys.positive("rope.scaling.attn_factor", 1.0) * yarn_magnitude(factor, 1.0),
        keys.positive("rope.scaling.yarn_beta_fast", 32.0),
        keys.positive("rope.scaling.yarn_beta_slow", 1.0),
    )


def _frequency_factors(file: GGUFFile, head_dim: int) -> tuple[float, ...] | None:
    """Llama 3's scaling, which the converter writes as one divisor per frequency in a tensor of its own."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.shape != (head_dim // 2,) or tensor.type != GGMLQuantizationType.F32:
        raise CheckpointError(
            f"{file.path}: tensor rope_freqs.weight is {tensor.type.name} {list(tensor.shape)}; "
            f"expected F32 [{head_dim // 2}]"
        )
    ((_, factors),) = file.pieces("rope_freqs.weight", 1)
    return tuple(float(factor) for factor in factors)


def _eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    ids = [_token_id(file, name) for name in ("eos", "eot", "eom")]
    tokens: list[str] = file.metadata.get("tokenizer.ggml.tokens", [])
    kinds: Iterable[int] = file.metadata.get("tokenizer.ggml.token_type", [])
    ids += [
        i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL_TOKEN and token in TURN_ENDS
    ]  # fmt: skip
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _token_id(file: GGUFFile, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = file.metadata.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ModelError(f"{file.path}: {key} is {value!r}; it must be a whole number")
    return value


class _Keys:
    """Typed access to the keys of the file's own architecture, such as `llama.block_count`."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.path = file.path
        self.arch = file.metadata.get("general.architecture", "absent")

    def has(self, name: str) -> bool:
        return f"{self.arch}.{name}" in self.file.metadata

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.path}: {self.arch}.{name} is {value!r}; only one whole number is supported")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{self.path}: {self.arch}.{name} is {value!r}; it must be a finite number")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise ModelError(f"{self.path}: {self.arch}.{name} is {value}; it must be above 0")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise ModelError(f"{self.path}: {self.arch}.{name} is {value!r}; it must be a string")
        return value

    def _value(self, name: str, default: Any) -> Any:  # noqa: ANN401 - checked by the caller
        value = self.file.metadata.get(f"{self.arch}.{name}", default)
        if value is None:
            raise ModelError(f"{self.path} has no {self.arch}.{name}")
        return value
