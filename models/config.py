"""What a decoder is made of: one frozen ModelConfig, whatever the file format and the family.

Knows no file format (see hf_config and gguf_config) and imports no torch, so that the edge can read it cheaply.
"""

import math
from dataclasses import dataclass
from typing import Literal

from models.errors import ModelError

Family = Literal["llama", "qwen2", "qwen3", "mistral", "gemma3"]
Activation = Literal["silu", "gelu_tanh"]  # the same as kernels.model_ops.ops.Activation, which imports torch

MAX_LAYERS = 1024  # beyond any model; readers refuse a damaged count before a list of that length is built


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor` (position interpolation)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, section 3): interpolation by wavelength, and cos/sin times `attention_factor`."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # whether the ramp's bounds are rounded to whole dimensions


def yarn_magnitude(factor: float, scale: float) -> float:
    """The growth of cos and sin that keeps the softmax's temperature when positions are stretched by `factor`."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeParams:
    """Rotary embedding of one kind of layer, over the whole head."""

    theta: float
    scaling: RopeScaling | None = None
    frequency_factors: tuple[float, ...] | None = None  # [head_dim / 2]; each frequency is divided by its factor


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What differs between the layers of one model."""

    rope: RopeParams
    sliding_window: int | None = None  # a token sees the last `sliding_window` tokens, itself included; None = all


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer. Sizes are those of the whole model."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    attention_scale: float  # multiplies q·k
    eos_token_ids: tuple[int, ...]  # any of them ends a sequence
    bos_token_id: int | None = None
    activation: Activation = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head before the rotary embedding
    sandwich_norms: bool = False  # Gemma: the outputs of attention and MLP are normed too, before the residual
    norm_weight_offset: float = 0.0  # added to norm weights as they are loaded: 1 where the file holds w of 1 + w
    embedding_scale: float = 1.0  # multiplies token embeddings, after rounding to the model's dtype
    attn_logit_softcap: float | None = None
    final_logit_softcap: float | None = None
    checkpoint_dtype: str | None = None  # the dtype that the files declare, such as "bfloat16"; None for GGUF

    def __post_init__(self) -> None:
        """Check what the decoder relies on. Raises ModelError."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_q_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.layers:
            raise ModelError("the model has no layers")
        if self.num_q_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_q_heads} query heads cannot share {self.num_kv_heads} key-value heads: "
                "the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; the rotary embedding needs an even number")
        for layer in self.layers:
            if layer.sliding_window is not None and layer.sliding_window < 1:
                raise ModelError(f"sliding_window is {layer.sliding_window}; it must be at least 1")

    @property
    def num_layers(self) -> int:
        """Decoder layers, which is also the number of KV layers."""
        return len(self.layers)
