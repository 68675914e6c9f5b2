"""What a sampler must draw, computed in float64: parameters that meet every cut, and the exact distributions."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling.sampling_batch import SamplingBatch

Sampler = Callable[[torch.Tensor, SamplingBatch], torch.Tensor]

# temperature, top_k, top_p, min_p
CUTS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.05),
    (0.9, 50, 0.8, 0.01),
    (2.0, 3, 0.5, 0.2),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 0.97, 0.0),
    (0.01, 10**9, 1.0, 1.0),
]
GREEDY = (0.0, 7, 0.5, 0.1)


def make_batch(rows: list[tuple[float, int, float, float]], uniform: torch.Tensor) -> SamplingBatch:
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    return SamplingBatch(temperature.float(), top_k, top_p.float(), min_p.float(), uniform.double(), False)


def exact_distribution(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.float64]:
    """What a row is drawn from, [vocab_size]; ties stay together."""
    scaled = logits.double().numpy() / temperature
    probs = np.exp(scaled - scaled.max())
    probs[probs < min_p] = 0
    if 0 < top_k < len(probs):
        probs[probs < np.sort(probs)[-top_k]] = 0
    if top_p < 1.0:
        ordered = np.sort(probs)[::-1]
        mass = np.cumsum(ordered)
        num_kept = max(1, int(((mass - ordered) < top_p * mass[-1]).sum()))
        probs[probs < ordered[num_kept - 1]] = 0
    return probs / probs.sum()


def is_drawn(token_id: int, probs: npt.NDArray[np.float64], uniform: float) -> bool:
    """The token is kept, and the number lies in its interval of the cumulative distribution."""
    end = probs[: token_id + 1].sum()
    return bool(probs[token_id] > 0 and end - probs[token_id] - 1e-6 <= uniform <= end + 1e-6)


def assert_rows_drawn(
    sample: Sampler, logits: torch.Tensor, rows: list[tuple[float, int, float, float]], uniform: torch.Tensor
) -> torch.Tensor:
    """Every row draws what it should: greedy ones the first of their likeliest tokens."""
    token_ids = sample(logits, make_batch(rows, uniform))
    assert token_ids.dtype == torch.int64
    for row, params in enumerate(rows):
        if params[0] == 0.0:
            assert token_ids[row] == logits[row].argmax()
        else:
            assert is_drawn(int(token_ids[row]), exact_distribution(logits[row], *params), float(uniform[row]))
    return token_ids
