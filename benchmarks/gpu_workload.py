"""The model and the requests that the engine and transformers both run: the shape of Llama 3.1 8B, random weights.

Owns the sizes, so that both run the same. Knows neither engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from models.config import LayerConfig, Llama3Scaling, ModelConfig, RopeParams

ROPE = RopeParams(500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that all arrive at once, all of one length; the keys of `num_requests` name the full sizes."""

    config: ModelConfig
    dtype: str
    num_requests: Mapping[str, int]
    prompt_tokens: int
    output_tokens: int
    max_batched_tokens: int  # of one step
    block_size: int

    @property
    def max_model_len(self) -> int:
        """Tokens of one request."""
        return self.prompt_tokens + self.output_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks that hold all requests at once, and the one for each that the scheduler keeps back as it admits."""
        return max(self.num_requests.values()) * (-(-self.max_model_len // self.block_size) + 1)


def llama_config(
    *, num_layers: int, hidden_size: int, intermediate_size: int, num_kv_heads: int, head_dim: int, vocab_size: int
) -> ModelConfig:
    """A Llama of these sizes, whose query heads together are as wide as its hidden state."""
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_q_heads=hidden_size // head_dim,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        layers=(LayerConfig(ROPE),) * num_layers,
        rms_norm_eps=1e-5,
        attention_scale=head_dim**-0.5,
        eos_token_ids=(vocab_size - 1,),
    )


FULL = Workload(
    config=llama_config(
        num_layers=32, hidden_size=4096, intermediate_size=14336, num_kv_heads=8, head_dim=128, vocab_size=128_256
    ),
    dtype="bfloat16",
    num_requests={"1 sequence": 1, "64 sequences": 64, "256 sequences": 256},
    prompt_tokens=128,
    output_tokens=128,
    max_batched_tokens=8192,
    block_size=16,
)
SMALL = Workload(
    config=llama_config(num_layers=1, hidden_size=32, intermediate_size=32, num_kv_heads=1, head_dim=16, vocab_size=64),
    dtype="float32",
    num_requests={"1 sequence": 1, "64 sequences": 2},
    prompt_tokens=3,
    output_tokens=3,
    max_batched_tokens=8,
    block_size=16,
)


def prompts(workload: Workload, num_requests: int, seed: int) -> list[list[int]]:
    """Random token ids, other ones for another seed: no cache of prefixes helps."""
    size = (num_requests, workload.prompt_tokens)
    return np.random.default_rng(seed).integers(0, workload.config.vocab_size, size).tolist()
