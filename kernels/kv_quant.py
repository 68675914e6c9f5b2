"""Quantisation of keys and values: one float32 scale for each head of each token, in plain torch.

The kernels that quantise as they write agree with it bit for bit. Knows no blocks and no cache.
"""

import torch

QUANTISED_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest magnitude that each dtype may hold
MIN_ABSMAX = 2.0**-100  # below it a head counts as this large: the reciprocal of its scale stays finite


def quantise(
    x: torch.Tensor,  # [..., head_dim]
    dtype: torch.dtype,  # a key of QUANTISED_MAX
) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric quantisation: x is about values * scale, with the scale max|x| / QUANTISED_MAX of each vector.

    Computes in float32, rounds half to even and clamps. A vector of zeros stays one.

    Returns:
        Values, [..., head_dim] of `dtype`, and scales, [...] float32.
    """
    largest = QUANTISED_MAX[dtype]
    wide = x.float()
    absmax = wide.abs().amax(dim=-1).clamp(min=MIN_ABSMAX)
    # Divided as tensors: with a number on either side torch may multiply by a reciprocal, which rounds twice.
    largest_of_each = torch.full_like(absmax, largest)
    multiplier = largest_of_each / absmax
    scaled = (wide * multiplier[..., None]).clamp(-largest, largest)
    # A cast to an integer truncates; one to a float8 rounds half to even by itself.
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), absmax / largest_of_each


def dequantise(
    values: torch.Tensor,  # [..., head_dim], of a quantised dtype
    scales: torch.Tensor,  # [...] float32
) -> torch.Tensor:  # [..., head_dim] float32
    """What the quantised values stand for."""
    return values.float() * scales[..., None]
