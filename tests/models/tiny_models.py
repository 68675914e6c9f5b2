"""Tiny random-weight models of every family, made with transformers, which is also the oracle."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}


def _llama(**settings: Any) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | settings))


def _qwen2(**settings: Any) -> transformers.PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES | settings))


def _qwen3(**settings: Any) -> transformers.PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES | {"head_dim": 32} | settings))


def _mistral(**settings: Any) -> transformers.PreTrainedModel:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES | settings))


def _gemma3(**settings: Any) -> transformers.PreTrainedModel:
    sizes = SIZES | {"num_hidden_layers": 4, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 7}
    pattern = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes | pattern | settings))


def _gemma3_multimodal() -> transformers.PreTrainedModel:
    text = _gemma3().config.to_dict()
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


BUILDERS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama": _llama,
    "llama_tied": lambda: _llama(tie_word_embeddings=True),
    "llama_biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama_multi_head": lambda: _llama(num_key_value_heads=4),
    "llama_head_dim": lambda: _llama(head_dim=24),
    "llama2_linear_rope": lambda: _llama(
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    ),
    "llama3_rope": lambda: _llama(rope_parameters=LLAMA3_ROPE),
    "llama_yarn_rope": lambda: _llama(rope_parameters=YARN_ROPE),
    "qwen2": _qwen2,
    "qwen2_tied": lambda: _qwen2(tie_word_embeddings=True),
    "qwen2_some_windows": lambda: _qwen2(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": _qwen3,
    "qwen3_bias": lambda: _qwen3(attention_bias=True, tie_word_embeddings=True),
    "mistral": lambda: _mistral(sliding_window=None),
    "mistral_window": lambda: _mistral(sliding_window=6),
    "gemma3": _gemma3,
    "gemma3_linear_rope": lambda: _gemma3(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        }
    ),
    "gemma3_softcap": lambda: _gemma3(final_logit_softcapping=3.0, tie_word_embeddings=False),
    "gemma3_multimodal": _gemma3_multimodal,
}


def build(name: str) -> transformers.PreTrainedModel:
    """A model in float32 whose every weight matters: transformers starts norms at 1 and biases at 0."""
    torch.manual_seed(1)
    model = BUILDERS[name]().float().eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(std=0.15)
    return model


def save(model: transformers.PreTrainedModel, directory: Path, max_shard_size: str = "5GB") -> Path:
    """Write the model as transformers does."""
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


@torch.inference_mode()
def oracle_logits(model: transformers.PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """[len(prompt), vocab_size] float32."""
    return model(input_ids=torch.tensor([prompt])).logits[0].float()
