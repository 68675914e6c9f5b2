"""Head norm and rotary embedding in plain torch, for the backends whose cache write is a step of its own.

Knows no cache.
"""

import torch
from torch.nn import functional

from kernels.attention.metadata import Rotation


def rotate_heads(
    heads: torch.Tensor,  # [num_tokens, num_q_heads + 2 * num_kv_heads, head_dim], queries, keys, values
    rotation: Rotation,
    num_kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split into queries, keys and values, the first two normed and rotated.

    Computes in float32 (float64 for float64 heads) and rounds once.

    Returns:
        [num_tokens, num_q_heads, head_dim], and twice [num_tokens, num_kv_heads, head_dim].
    """
    num_rotated = heads.shape[1] - num_kv_heads
    # Queries and keys go through norm and rotation as one tensor: half the number of small kernels.
    query_key, value = heads.split((num_rotated, num_kv_heads), dim=1)
    wide = query_key.to(torch.promote_types(heads.dtype, torch.float32))
    if rotation.norm_weight is not None:
        wide = functional.rms_norm(wide, wide.shape[-1:], None, rotation.norm_eps) * rotation.norm_weight
    rotated = rotate(wide, rotation.cos[:, None], rotation.sin[:, None]).to(heads.dtype)
    query, key = rotated.split((num_rotated - num_kv_heads, num_kv_heads), dim=1)
    return query, key, value


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [num_tokens, num_heads, head_dim] by angles [num_tokens, 1, head_dim / 2]; a new tensor."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
