"""Reading config.json: published forms old and new, against transformers' own reading of them, and refusals."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from models.config import LayerConfig, LinearScaling, Llama3Scaling, ModelConfig, RopeParams
from models.config_reader import read_config
from models.errors import CheckpointError, ModelError, UnsupportedModelError
from models.hf_config import FAMILIES, read_hf_config

# As published, in the form that transformers 4 wrote: what equals a default is left out.
LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN2_5 = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = QWEN2_5 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "hidden_size": 1024,
    "rope_scaling": None,
    "sliding_window": None,
}
MISTRAL_0_1 = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
GEMMA_3_4B_TEXT = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": GEMMA_3_4B_TEXT,
    "torch_dtype": "bfloat16",
}
PUBLISHED = {
    "llama 3.1": LLAMA_3_1,
    "qwen 2.5": QWEN2_5,
    "qwen 2 windowed": QWEN2_5 | {"use_sliding_window": True},
    "qwen 3": QWEN3,
    "mistral 0.1": MISTRAL_0_1,
    "gemma 3 1b": GEMMA_3_1B,
    "gemma 3 4b": GEMMA_3_4B,
}


def read(directory: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_hf_config(directory)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_equal_what_transformers_reads(name: str, tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED[name])
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert config.vocab_size == theirs.vocab_size
    assert config.hidden_size == theirs.hidden_size
    assert config.intermediate_size == theirs.intermediate_size
    assert config.num_layers == theirs.num_hidden_layers
    assert config.num_q_heads == theirs.num_attention_heads
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    window = getattr(theirs, "sliding_window", None)
    assert [layer.sliding_window for layer in config.layers] == [
        window if kind == "sliding_attention" else None for kind in types
    ]


def test_layers_of_the_published_models(tmp_path: Path) -> None:
    llama = read(tmp_path, LLAMA_3_1)
    assert llama.layers == (LayerConfig(RopeParams(500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))),) * 32
    assert llama.eos_token_ids == (128001, 128008, 128009) and llama.bos_token_id == 128000
    assert llama.checkpoint_dtype == "bfloat16" and llama.attention_scale == 128**-0.5
    qwen = read(tmp_path, QWEN2_5)
    assert qwen.qkv_bias and not qwen.o_bias and not qwen.qk_norm
    assert read(tmp_path, QWEN3).qk_norm and not read(tmp_path, QWEN3).qkv_bias
    assert read(tmp_path, MISTRAL_0_1 | {"sliding_window": None}).layers == (LayerConfig(RopeParams(10_000.0)),) * 32
    gemma = read(tmp_path, GEMMA_3_4B)
    local = LayerConfig(RopeParams(10_000.0), 1024)
    assert gemma.layers[4:7] == (local, LayerConfig(RopeParams(1_000_000.0, LinearScaling(8.0))), local)
    assert gemma.embedding_scale == 2560**0.5 and gemma.norm_weight_offset == 1.0 and gemma.sandwich_norms
    assert gemma.attention_scale == 1 / 16 and gemma.activation == "gelu_tanh"
    assert gemma.eos_token_ids == (1, 106)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "gemma 3 4b"])
def test_what_transformers_5_writes_reads_the_same(name: str, tmp_path: Path) -> None:
    old = read(tmp_path, PUBLISHED[name])
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in written and "rope_scaling" not in written
    assert read_hf_config(tmp_path) == old


def test_end_ids_of_the_generation_config_go_first(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN2_5, {"eos_token_id": [151645, 151643]})
    assert config.eos_token_ids == (151645, 151643) and config.bos_token_id == 151643
    assert read(tmp_path, QWEN2_5, {"eos_token_id": 7}).eos_token_ids == (7,)
    assert read(tmp_path, QWEN2_5, {"temperature": 0.6}).eos_token_ids == (151645,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures is MambaForCausalLM; supported are LlamaForCausalLM"),
        ({"architectures": None}, "architectures is none, model_type llama"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'; supported are default"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type is 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; supported are silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config asks for gptq"),
        ({"layer_types": ["chunked_attention"] * 32}, "layer_types has 'chunked_attention'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, LLAMA_3_1 | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'; it must be a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 5}, "32 query heads cannot share 5 key-value heads"),
        ({"head_dim": 63}, "head_dim is 63"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 32 layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"eos_token_id": [1, "</s>"]}, "eos_token_id is"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no factor"),
        ({"rope_scaling": 4}, "rope_scaling is 4; it must be an object"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, LLAMA_3_1 | change)


def test_every_supported_architecture_is_one_of_transformers() -> None:
    assert all(hasattr(transformers, name) for name in FAMILIES)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_config(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="does not hold a JSON object"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither a model directory nor a \.gguf file"):
        read_config(tmp_path / "config.json")


def test_reading_a_configuration_needs_no_torch() -> None:
    code = "import sys, models.config_reader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
