"""The sampler against distributions computed by hand in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling.sampling_batch import SamplingBatch
from kernels.sampling.torch_sampler import sample, token_logprobs
from models.sampler import uniform_numbers


def sampling_batch(num_rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.0):
    def full(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(num_rows).clone()

    return SamplingBatch(
        temperature=full(temperature, torch.float32),
        top_k=full(top_k, torch.int64),
        top_p=full(top_p, torch.float32),
        min_p=full(min_p, torch.float32),
        uniform=full(uniform, torch.float64),
        all_greedy=not torch.as_tensor(temperature).any(),
    )


def kept_distribution(logits, temperature, top_k, top_p, min_p):
    """The distribution that a row is drawn from, in float64 and token by token."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    probs[probs < min_p * probs.max()] = 0
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    if top_k:
        probs[order[top_k:]] = 0
    total, kept = probs.sum(), 0.0
    for i in order:
        if top_p < 1 and kept >= top_p * total:
            probs[i] = 0
        kept += probs[i]
    return probs / probs.sum()


LOGITS = [2.0, 1.0, 0.5, 0.1, -1.0, -3.0]


@pytest.mark.parametrize(
    "cut",
    [{}, {"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 4, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7}],
)
def test_a_grid_of_uniform_numbers_reproduces_the_distribution(cut):
    settings_ = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **cut}
    num_draws = 20_000
    uniform = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    logits = torch.tensor(LOGITS).expand(num_draws, -1)
    drawn = sample(logits, sampling_batch(num_draws, uniform=uniform, **settings_))
    frequency = np.bincount(drawn.numpy(), minlength=len(LOGITS)) / num_draws
    np.testing.assert_allclose(frequency, kept_distribution(LOGITS, **settings_), atol=1.0 / num_draws)


@given(
    seed=st.integers(0, 2**32 - 1),
    top_k=st.sampled_from([0, 1, 3, 500]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 2.0]),
    uniform=st.floats(0, 1, exclude_max=True),
)
@settings(deadline=None, max_examples=150)
def test_only_kept_tokens_are_drawn(seed, top_k, top_p, min_p, temperature, uniform):
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed)) * 3
    batch = sampling_batch(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniform=uniform)
    [token_id] = sample(logits, batch).tolist()
    # A little looser than the cut asked for, so that float32 rounding at its edge is no failure.
    kept = kept_distribution(logits[0].numpy(), temperature, top_k, min(1.0, top_p + 1e-5), min_p * 0.9999)
    assert kept[token_id] > 0


def test_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(16, 1000, generator=generator)
    uniform = torch.rand(16, dtype=torch.float64, generator=generator)
    temperature = torch.tensor([0.0, 0.5, 1.0, 1.5] * 4)
    top_k = torch.tensor([0, 5] * 8)
    top_p = torch.tensor([1.0, 1.0, 0.9, 0.5] * 4)
    together = sample(logits, sampling_batch(16, temperature=temperature, top_k=top_k, top_p=top_p, uniform=uniform))
    for i in range(16):
        alone = sampling_batch(1, temperature=temperature[i], top_k=top_k[i], top_p=top_p[i], uniform=uniform[i])
        assert sample(logits[i : i + 1], alone).item() == together[i].item()


def test_greedy_rows_take_the_best_beside_rows_that_draw():
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(1))
    batch = sampling_batch(8, temperature=torch.tensor([0.0, 5.0] * 4), uniform=0.999)
    assert torch.equal(sample(logits, batch)[::2], logits.argmax(-1)[::2])


def test_the_last_uniform_number_still_draws_a_token_with_mass():
    logits = torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]])
    assert sample(logits, sampling_batch(1, uniform=1.0 - 2.0**-53)).item() == 1


def test_uniform_numbers_are_uniform_and_depend_on_every_argument():
    positions = np.arange(20_000)
    zeros = np.zeros_like(positions)
    draws = [
        uniform_numbers(zeros + 5, zeros, positions),
        uniform_numbers(zeros + 6, zeros, positions),
        uniform_numbers(zeros + 5, zeros + 1, positions),
        uniform_numbers(positions, zeros, zeros),
        uniform_numbers(zeros + (2**63 - 1), zeros, positions),
    ]
    for drawn in draws:
        assert 0 <= drawn.min() < drawn.max() < 1
        counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
        # Chi-squared with 19 degrees of freedom: above 50 once in ten thousand times; the numbers are fixed.
        assert ((counts - 1000) ** 2 / 1000).sum() < 50
    for i, first in enumerate(draws):
        for second in draws[:i]:
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.03


def test_logprobs_are_those_of_the_plain_softmax():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    expected = torch.log_softmax(logits.double(), -1)
    chosen, top_ids, top = token_logprobs(logits, torch.tensor([4, 5, 6]), 5)
    torch.testing.assert_close(chosen.double(), expected[range(3), [4, 5, 6]], atol=1e-5, rtol=0)
    torch.testing.assert_close(top.double(), expected.topk(5).values, atol=1e-5, rtol=0)
    assert torch.equal(top_ids, expected.topk(5).indices)
