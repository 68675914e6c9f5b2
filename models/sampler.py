"""What surrounds the choice of a token: the random numbers that it draws on, and log-probabilities.

A row's numbers depend on its own seed and position alone: never on the batch it ran in, nor on how often it was
preempted. Knows no sequences; the choice itself is in kernels/sampling.
"""

import numpy as np
import torch

# Tokens of equal log-probability come in an order that depends on how many are asked for. The number asked for is
# therefore fixed, at the most that a request may want: a row's order must not depend on what other rows want.
_NUM_CANDIDATES = 20

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniform_numbers(seeds: np.ndarray, indices: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each row, a pure function of (seed, sequence index, position of the sampled token).

    A counter-based generator in the manner of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): no state to keep,
    so that a sequence that is recomputed draws the same numbers again.

    Args:
        seeds: [num_rows] int64, not negative.
        indices: [num_rows] int64.
        positions: [num_rows] int64.

    Returns:
        [num_rows] float64, multiples of 2**-53.
    """
    state = _mix(seeds.astype(np.uint64) + _GOLDEN_GAMMA)
    state = _mix(state ^ (indices.astype(np.uint64) + _GOLDEN_GAMMA))
    state = _mix(state + positions.astype(np.uint64) * _GOLDEN_GAMMA)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def token_logprobs(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32
    token_ids: torch.Tensor,  # [num_rows] int64
    num_top: int,  # as many as the vocabulary has, at most
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities under the plain softmax, whatever the sampling parameters.

    Returns:
        Those of `token_ids`, [num_rows]; the `num_top` best token ids, [num_rows, num_top]; and theirs, best first.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    num_candidates = max(num_top, _NUM_CANDIDATES) if num_top else 0
    top_logprobs, top_ids = logprobs.topk(min(num_candidates, logits.shape[-1]), dim=-1)
    return logprobs.gather(-1, token_ids[:, None]).squeeze(-1), top_ids[:, :num_top], top_logprobs[:, :num_top]


def _mix(state: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser; unsigned arithmetic wraps."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
