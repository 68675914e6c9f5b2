"""Reads config.json and generation_config.json of a Hugging Face directory into a ModelConfig.

Knows the field names of each family and their defaults in transformers, which leaves a field out of config.json
where it equals the default. Must not know tensors.
"""

from dataclasses import dataclass
from pathlib import Path

from models.config import MAX_LAYERS, Activation, Family, LayerConfig, ModelConfig
from models.errors import ModelError, UnsupportedModelError
from models.hf_fields import Fields
from models.hf_rope import LAYER_TYPES, read_rope

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",  # its text model; the vision tower is not loaded
}
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class _Defaults:
    """What transformers assumes for a family where config.json is silent. None: the field has to be there."""

    max_position_embeddings: int
    vocab_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = None
    tie_word_embeddings: bool = False


_DEFAULTS: dict[Family, _Defaults] = {
    "llama": _Defaults(2048),
    "qwen2": _Defaults(32_768),
    "qwen3": _Defaults(32_768, head_dim=128),
    "mistral": _Defaults(131_072, num_key_value_heads=8),
    "gemma3": _Defaults(
        131_072,
        vocab_size=262_208,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        rope_theta=1_000_000.0,
        sliding_window=4096,
        tie_word_embeddings=True,
    ),
}


def read_hf_config(directory: Path) -> ModelConfig:
    """Read the configuration of a model directory.

    Raises:
        UnsupportedModelError: the architecture or a setting is not supported.
        ModelError: a field is missing or not of its kind.
        CheckpointError: a file is missing or damaged.
    """
    top = Fields.read(directory / "config.json")
    family = _family(top)
    fields = top.section("text_config") if top.has("text_config") else top
    _refuse_unsupported(top, fields)
    defaults = _DEFAULTS[family]
    num_q_heads = fields.integer("num_attention_heads", defaults.num_attention_heads)
    hidden_size = fields.integer("hidden_size")
    if num_q_heads < 1:
        raise fields.wrong("num_attention_heads", "at least 1")
    head_dim = fields.integer("head_dim", defaults.head_dim or hidden_size // num_q_heads)
    attention_bias = family in ("llama", "qwen3", "gemma3") and fields.flag("attention_bias", False)
    gemma = family == "gemma3"
    eos, bos = _special_token_ids(directory, top, fields)
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size", defaults.vocab_size),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_q_heads=num_q_heads,
        num_kv_heads=fields.integer("num_key_value_heads", defaults.num_key_value_heads or num_q_heads),
        head_dim=head_dim,
        max_position_embeddings=_max_positions(fields, defaults),
        layers=_layers(fields, family, head_dim),
        rms_norm_eps=fields.positive("rms_norm_eps", defaults.rms_norm_eps),
        attention_scale=(fields.positive("query_pre_attn_scalar", 256.0) if gemma else head_dim) ** -0.5,
        eos_token_ids=eos,
        bos_token_id=bos,
        activation=_activation(fields, family),
        tie_word_embeddings=fields.flag(
            "tie_word_embeddings", top.flag("tie_word_embeddings", defaults.tie_word_embeddings)
        ),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias", False),
        qk_norm=family in ("qwen3", "gemma3"),
        sandwich_norms=gemma,
        norm_weight_offset=1.0 if gemma else 0.0,
        embedding_scale=hidden_size**0.5 if gemma else 1.0,
        attn_logit_softcap=_softcap(fields, "attn_logit_softcapping"),
        final_logit_softcap=_softcap(fields, "final_logit_softcapping"),
        checkpoint_dtype=_dtype(top, fields),
    )


def _family(top: Fields) -> Family:
    architectures = top.strings("architectures")
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name]
    found = ", ".join(architectures) or f"none, model_type {top.text('model_type', 'absent')}"
    raise UnsupportedModelError(f"{top.where}: architectures is {found}; supported are {', '.join(FAMILIES)}")


def _refuse_unsupported(top: Fields, fields: Fields) -> None:
    for section in (top, fields):
        if section.has("quantization_config"):
            method = section.section("quantization_config").text("quant_method", "unnamed")
            raise UnsupportedModelError(
                f"{section.where}: quantization_config asks for {method}; "
                "supported are unquantised safetensors, and GGUF files of any quantisation"
            )
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{fields.where}: use_bidirectional_attention is true; only causal attention is")


def _max_positions(fields: Fields, defaults: _Defaults) -> int:
    return fields.integer("max_position_embeddings", defaults.max_position_embeddings)


def _layers(fields: Fields, family: Family, head_dim: int) -> tuple[LayerConfig, ...]:
    defaults = _DEFAULTS[family]
    num_layers = fields.integer("num_hidden_layers")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise fields.wrong("num_hidden_layers", f"from 1 to {MAX_LAYERS}")
    types = _layer_types(fields, family, num_layers)
    window = None
    if "sliding_attention" in types:
        window = fields.integer("sliding_window", defaults.sliding_window)
    local_theta = fields.positive("rope_local_base_freq", 10_000.0) if family == "gemma3" else None
    rope = read_rope(fields, defaults.rope_theta, local_theta, _max_positions(fields, defaults), head_dim)
    kinds = {
        "full_attention": LayerConfig(rope["full_attention"]),
        "sliding_attention": LayerConfig(rope["sliding_attention"], window),
    }
    return tuple(kinds[kind] for kind in types)


def _layer_types(fields: Fields, family: Family, num_layers: int) -> list[str]:
    declared = fields.strings("layer_types")
    if declared and len(declared) != num_layers:
        raise ModelError(f"{fields.where}: layer_types has {len(declared)} entries for {num_layers} layers")
    for kind in declared:
        if kind not in LAYER_TYPES:
            raise UnsupportedModelError(
                f"{fields.where}: layer_types has {kind!r}; supported are {', '.join(LAYER_TYPES)}"
            )
    if declared:
        return declared
    if family == "gemma3":
        pattern = fields.integer("sliding_window_pattern", 6)
        if pattern < 1:
            raise fields.wrong("sliding_window_pattern", "at least 1")
        return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    if family == "mistral":
        # transformers windows every layer of a Mistral; a null window (v0.2 and later) means none.
        return ["sliding_attention" if fields.has("sliding_window") else "full_attention"] * num_layers
    if family in ("qwen2", "qwen3") and fields.flag("use_sliding_window", False):
        first = fields.integer("max_window_layers", 28)
        return ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return ["full_attention"] * num_layers


def _activation(fields: Fields, family: Family) -> Activation:
    name, default = ("hidden_activation", "gelu_pytorch_tanh") if family == "gemma3" else ("hidden_act", "silu")
    value = fields.text(name, default)
    if value not in ACTIVATIONS:
        raise UnsupportedModelError(f"{fields.where}: {name} is {value!r}; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


def _softcap(fields: Fields, name: str) -> float | None:
    return fields.positive(name) if fields.has(name) else None


def _dtype(top: Fields, fields: Fields) -> str | None:
    for section in (fields, top):
        for name in ("dtype", "torch_dtype"):
            if section.has(name):
                return section.text(name).removeprefix("torch.")
    return None


def _special_token_ids(directory: Path, top: Fields, fields: Fields) -> tuple[tuple[int, ...], int | None]:
    """End and begin ids; generation_config.json, which people edit to end chats, goes before config.json."""
    sources = [top, fields]
    if (directory / "generation_config.json").exists():
        sources.insert(0, Fields.read(directory / "generation_config.json"))
    eos = next((source.token_ids("eos_token_id") for source in sources if source.has("eos_token_id")), ())
    bos = next((source.token_ids("bos_token_id") for source in sources if source.has("bos_token_id")), ())
    return eos, bos[0] if bos else None
