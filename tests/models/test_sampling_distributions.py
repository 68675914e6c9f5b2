"""Chi-square: tokens drawn for many seeds, sequences and positions follow the distribution that theory gives.

The numbers that are drawn on are fixed, so each test passes always or never.
"""

import numpy as np
import pytest
import torch

from kernels.sampling.sampling_batch import SamplingBatch
from kernels.sampling.torch_sampler import sample
from models.sampler import uniform_numbers
from scheduler.sampling_params import SamplingParams
from tests.models.logit_oracle import edited_logits, kept_distribution
from tests.models.test_step_edits import Running, Steps

NUM_DRAWS = 40_000
VOCAB_SIZE = 45
LOGITS = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(4)) * 1.5

CUTS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.8},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.08},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
]
EDITS = {
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.3,
    "logit_bias": ((3, 2.0), (4, -1.0)),
    "bad_words": ((5,), (2, 6)),
    "min_tokens": 9,
    "allowed_token_ids": tuple(range(1, 40)),
}


def expand(value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((NUM_DRAWS,), value, dtype=dtype)


def draws_on(what: str) -> np.ndarray:
    """Uniform numbers of as many seeds, sequences or positions, the others fixed."""
    numbers = {name: np.full(NUM_DRAWS, 3, np.int64) for name in ("seeds", "indices", "positions")}
    numbers[what] = np.arange(NUM_DRAWS)
    return uniform_numbers(**numbers)


def draw(logits: torch.Tensor, params: SamplingParams, uniform: np.ndarray) -> np.ndarray:
    """How often each token comes, [vocab_size]."""
    batch = SamplingBatch(
        temperature=expand(params.temperature, torch.float32),
        top_k=expand(params.top_k, torch.int64),
        top_p=expand(params.top_p, torch.float32),
        min_p=expand(params.min_p, torch.float32),
        uniform=torch.from_numpy(uniform),
        all_greedy=False,
    )
    return np.bincount(sample(logits.expand(NUM_DRAWS, -1), batch).numpy(), minlength=VOCAB_SIZE)


def assert_follows(counts: np.ndarray, probs: np.ndarray) -> None:
    assert not counts[probs == 0].any()
    common = probs * NUM_DRAWS >= 5  # chi-square holds for cells with a few draws; the others go together
    expected = np.append(probs[common], probs[~common].sum()) * NUM_DRAWS
    got = np.append(counts[common], counts[~common].sum())
    expected, got = expected[expected >= 1], got[expected >= 1]
    degrees = len(expected) - 1
    # Wilson and Hilferty 1931: the cube root of chi-square / degrees is nearly normal. 3.7 deviations: 1 in 10,000.
    statistic = ((got - expected) ** 2 / expected).sum() / degrees
    variance = 2 / (9 * degrees)
    assert (statistic ** (1 / 3) - (1 - variance)) / variance**0.5 < 3.7


@pytest.mark.parametrize("what", ["seeds", "indices", "positions"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_draws_follow_the_distribution(cut: dict[str, float], what: str) -> None:
    params = SamplingParams(9, **cut)
    assert_follows(draw(LOGITS, params, draws_on(what)), kept_distribution(LOGITS.numpy(), params))


@pytest.mark.parametrize("cut", [CUTS[0], CUTS[-1]], ids=str)
def test_draws_from_edited_logits_follow_the_edited_distribution(cut: dict[str, float]) -> None:
    """Edits come before temperature and cuts."""
    params = SamplingParams(9, **cut, **EDITS)
    sequence = Running(0, params, [1, 2, 3], [8, 8, 2])
    edited = Steps().edit([sequence], [True], LOGITS[None], {})
    expected = edited_logits(LOGITS.numpy(), params, sequence.prompt, sequence.generated, ())
    expected[[7, 20]] = -np.inf  # end tokens, before min_tokens
    assert_follows(draw(edited[0], params, draws_on("seeds")), kept_distribution(expected, params))


def test_a_wrong_distribution_is_noticed() -> None:
    counts = draw(LOGITS, SamplingParams(9, temperature=1.05), draws_on("seeds"))
    with pytest.raises(AssertionError):
        assert_follows(counts, kept_distribution(LOGITS.numpy(), SamplingParams(9)))
