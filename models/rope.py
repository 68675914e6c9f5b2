"""Rotary position embedding: frequencies from RopeParams, and the angles of a batch.

All checkpoints are brought to the half-rotation layout when they are loaded. Knows no layers; the rotation itself is
part of the cache write (kernels/attention).
"""

import math

import torch

from kernels.model_ops.ops import ModelOps
from models.config import Llama3Scaling, RopeParams, YarnScaling


class RotaryEmbedding:
    """The frequencies of one kind of layer.

    Angles are computed for each step from the positions, once for all layers that share the frequencies. A table up
    to max_position_embeddings would be tens of megabytes to save two small element-wise kernels a step.
    """

    def __init__(self, params: RopeParams, head_dim: int, device: torch.device) -> None:
        """Compute the inverse frequencies in float32, as transformers does, so that both round alike."""
        self.inverse_frequencies = inverse_frequencies(params, head_dim).to(device)  # [head_dim / 2] float32
        scaling = params.scaling
        self.magnitude = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0

    def angles(self, positions: torch.Tensor, ops: ModelOps) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, [num_tokens, head_dim / 2] float32 each, for positions [num_tokens]."""
        return ops.rotary_angles(positions, self.inverse_frequencies, self.magnitude)


def inverse_frequencies(params: RopeParams, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / params.theta**exponents
    scaling = params.scaling
    if isinstance(scaling, Llama3Scaling):
        frequencies = _scale_llama3(frequencies, scaling)
    elif isinstance(scaling, YarnScaling):
        frequencies = _scale_yarn(frequencies, scaling, params.theta, head_dim)
    elif scaling is not None:
        frequencies = frequencies / scaling.factor
    if params.frequency_factors is not None:
        frequencies = frequencies / torch.tensor(params.frequency_factors, dtype=torch.float32)
    return frequencies


def _scale_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Llama 3.1: wavelengths beyond the original context are stretched whole, short ones not at all."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # within the original context
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = ramp.clamp(0, 1)
    return frequencies * kept + frequencies / scaling.factor * (1 - kept)


def _scale_yarn(frequencies: torch.Tensor, scaling: YarnScaling, theta: float, head_dim: int) -> torch.Tensor:
    """YaRN's "NTK-by-parts" (section 3.2): a ramp over dimensions between beta_fast and beta_slow turns."""

    def dimension_of(turns: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step rather than a division by zero
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies * (1 - stretched) + frequencies / scaling.factor * stretched
