"""Turns logits into token ids and log-probabilities, vectorised over the rows of a step.

A row's token depends on its own logits, parameters and position alone: never on the batch it ran in, nor on how
often it was preempted. Knows no sequences.
"""

from dataclasses import dataclass

import numpy as np
import torch

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of the rows that sample in this step, on the device of the logits."""

    temperature: torch.Tensor  # [num_rows] float32; 0 = greedy
    top_k: torch.Tensor  # [num_rows] int64; 0 = off
    top_p: torch.Tensor  # [num_rows] float32
    min_p: torch.Tensor  # [num_rows] float32
    uniform: torch.Tensor  # [num_rows] float64 in [0, 1), from `uniform_numbers`
    all_greedy: bool


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


def sample(logits: torch.Tensor, params: SamplingBatch) -> torch.Tensor:
    """Choose one token for each row.

    The distribution is softmax(logits / temperature), cut by min_p, then top_k, then top_p, and drawn from by
    inverting its cumulative sum at `params.uniform`.

    Args:
        logits: [num_rows, vocab_size] float32.
        params: one entry per row.

    Returns:
        [num_rows] int64.
    """
    token_ids = logits.argmax(dim=-1)
    if params.all_greedy:
        return token_ids
    rows = params.temperature.nonzero().squeeze(-1)
    probs = torch.softmax(logits[rows] / params.temperature[rows, None], dim=-1)
    probs = _keep_min_p(probs, params.min_p[rows])
    probs = _keep_top_k(probs, params.top_k[rows])
    probs = _keep_top_p(probs, params.top_p[rows])
    token_ids[rows] = _draw(probs, params.uniform[rows])
    return token_ids


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
    top_logprobs, top_ids = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return logprobs.gather(-1, token_ids[:, None]).squeeze(-1), top_ids, top_logprobs


def _mix(state: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser; unsigned arithmetic wraps."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _keep_min_p(probs: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Drop tokens less likely than `min_p` times the likeliest."""
    if not min_p.any():
        return probs
    return probs.masked_fill(probs < min_p[:, None] * probs.amax(dim=-1, keepdim=True), 0.0)


def _keep_top_k(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keep the `top_k` likeliest tokens, and what ties with the last of them."""
    rows = top_k.nonzero().squeeze(-1)
    if rows.numel() == 0:
        return probs
    k = top_k[rows].clamp(max=probs.shape[-1])
    best = probs[rows].topk(int(k.max()), dim=-1).values
    threshold = best.gather(-1, k[:, None] - 1)
    probs[rows] = probs[rows].masked_fill(probs[rows] < threshold, 0.0)
    return probs


def _keep_top_p(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of likeliest tokens that holds `top_p` of the remaining mass, and ties with its last."""
    rows = (top_p < 1.0).nonzero().squeeze(-1)
    if rows.numel() == 0:
        return probs
    ordered = probs[rows].sort(dim=-1, descending=True).values
    mass = ordered.double().cumsum(dim=-1)
    # A token stays while the mass before it has not reached top_p; the likeliest always stays.
    num_kept = ((mass - ordered) < top_p[rows, None] * mass[:, -1:]).sum(dim=-1).clamp(min=1)
    threshold = ordered.gather(-1, num_kept[:, None] - 1)
    probs[rows] = probs[rows].masked_fill(probs[rows] < threshold, 0.0)
    return probs


def _draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first token at which the cumulative mass exceeds `uniform` of the whole."""
    mass = probs.double().cumsum(dim=-1)
    target = uniform[:, None] * mass[:, -1:]
    drawn = torch.searchsorted(mass, target, right=True).squeeze(-1)
    # Rounding may put the target at the very end; the last token with any mass is then the one.
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).to(torch.uint8).argmax(dim=-1)
    return torch.minimum(drawn, last)
