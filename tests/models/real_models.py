"""The two real models as transformers builds them, out of the weights of the same GGUF file: the oracle."""

from pathlib import Path

import transformers

from tests.models.gguf_files import from_gguf


def smollm2_oracle(path: Path) -> transformers.PreTrainedModel:
    """SmolLM2-135M-Instruct in float32."""
    config = transformers.LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    return from_gguf(transformers.LlamaForCausalLM, config, path)


def gemma3_oracle(path: Path) -> transformers.PreTrainedModel:
    """Gemma 3 270M in float32."""
    config = transformers.Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        max_position_embeddings=32_768,
        sliding_window=512,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3,
    )
    return from_gguf(transformers.Gemma3ForCausalLM, config, path)
