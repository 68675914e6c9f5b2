"""The Triton sampler under the interpreter, against exact cumulative distributions in float64."""

import dataclasses

import numpy as np
import pytest
import torch

from kernels.sampling import torch_sampler
from kernels.sampling.sampling_batch import SamplingBatch
from kernels.sampling.triton_sampler import TILE, sample
from tests.kernels.sampling_oracle import CUTS, GREEDY, assert_rows_drawn, exact_distribution, make_batch


@pytest.mark.parametrize("spread", [0.3, 4.0])
@pytest.mark.parametrize("vocab_size", [40, TILE, TILE + 1, 3 * TILE - 5])
def test_every_cut(vocab_size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    rows = [*CUTS, GREEDY]
    wide = torch.full((len(rows), vocab_size + 3), torch.nan)
    logits = wide[:, :vocab_size]
    logits.copy_(torch.randn(logits.shape, generator=generator) * spread - 3)
    assert_rows_drawn(sample, logits, rows, torch.rand(len(rows), dtype=torch.float64, generator=generator))


@pytest.mark.full
@pytest.mark.parametrize("vocab_size", [128_256, 262_144])
def test_large_vocabularies(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(CUTS), vocab_size, generator=generator) * 3
    assert_rows_drawn(sample, logits, CUTS, torch.rand(len(CUTS), dtype=torch.float64, generator=generator))


@pytest.mark.parametrize("params", [CUTS[0], CUTS[4]], ids=str)
def test_a_grid_of_numbers_draws_every_kept_token(params: tuple[float, int, float, float]) -> None:
    num_draws = 60
    logits = torch.tensor([2.0, -torch.inf, 1.0, 0.5, -30.0, 0.1, -1.0, -3.0]).expand(num_draws, -1)
    uniform = (torch.arange(num_draws) + 0.5) / num_draws
    token_ids = assert_rows_drawn(sample, logits, [params] * num_draws, uniform)
    assert (token_ids.diff() >= 0).all()  # in the order of the vocabulary
    probs = exact_distribution(logits[0], *params)
    assert set(np.flatnonzero(probs > 1 / num_draws)) <= set(token_ids.tolist())


def test_ties_at_a_cut_stay_together() -> None:
    """Few different logits, so that every cut falls among equal ones: the same tokens as the sampler in torch.

    The bisection halves the five levels at one of them.
    """
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(0, 5, (30, 300), generator=generator).float()
    params = [(1.0, 0, 0.5, 0.0), (1.0, 10, 1.0, 0.0), (1.0, 100, 0.9, 0.05)] * 10
    batch = make_batch(params, torch.rand(30, dtype=torch.float64, generator=generator))
    assert torch.equal(sample(logits, batch), torch_sampler.sample(logits, batch))


def test_a_cut_among_neighbouring_floats_ends() -> None:
    """Between two of them the bisection has no middle. Scaled, some become equal, and then stay together."""
    num_rows = 20
    logits = (-1.0 - torch.arange(num_rows, dtype=torch.float64) * 2.0**-23).float()
    logits = torch.cat((torch.zeros(1), logits)).expand(num_rows, -1)
    rows = [(1.0, 1 + row, 1.0, 0.0) for row in range(num_rows)]
    last_kept = sample(logits, make_batch(rows, torch.full((num_rows,), 1.0 - 2.0**-53, dtype=torch.float64)))
    excess = last_kept - torch.arange(num_rows)
    assert ((excess >= 0) & (excess <= 1)).all()


def test_the_likeliest_of_equals_is_the_first() -> None:
    logits = torch.zeros(3, 3 * TILE)
    logits[0, [100, TILE + 7, 2 * TILE]] = 9.0
    logits[1, [TILE + 100, 2 * TILE + 3]] = 9.0
    batch = make_batch([GREEDY] * 3, torch.zeros(3))
    assert sample(logits, batch).tolist() == [100, TILE + 100, 0]
    assert sample(logits, dataclasses.replace(batch, all_greedy=True)).tolist() == [100, TILE + 100, 0]


def test_tokens_without_mass_are_never_drawn() -> None:
    logits = torch.full((4, 2 * TILE), -torch.inf)
    logits[:, [70, 90]] = 5.0
    ends = torch.tensor([0.0, 0.5 - 2.0**-20, 0.5, 1.0 - 2.0**-53], dtype=torch.float64)
    assert sample(logits, make_batch([CUTS[0]] * 4, ends)).tolist() == [70, 70, 90, 90]


def test_extreme_rows_give_a_token_of_the_vocabulary() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    logits[0] = -torch.inf
    logits[1] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] *= 1e37
    logits[4, 10:] = torch.finfo(torch.float32).min
    rows = [CUTS[4]] * 5 + [(1e-38, 3, 0.9, 0.1)]
    token_ids = sample(logits, make_batch(rows, torch.full((6,), 0.999)))
    assert ((token_ids >= 0) & (token_ids < 50)).all()
    best = logits.argmax(dim=-1)
    assert token_ids[[2, 3, 5]].tolist() == best[[2, 3, 5]].tolist()
    assert token_ids[4] < 10


def test_a_row_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(CUTS), TILE + 200, generator=generator)
    uniform = torch.rand(len(CUTS), dtype=torch.float64, generator=generator)
    together = sample(logits, make_batch(CUTS, uniform))
    for row in (0, 2, 4):
        alone = sample(logits[row : row + 1], make_batch(CUTS[row : row + 1], uniform[row : row + 1]))
        assert alone.item() == together[row].item()


def test_no_rows() -> None:
    nothing = torch.zeros(0)
    batch = SamplingBatch(nothing, nothing.long(), nothing, nothing, nothing.double(), all_greedy=False)
    assert sample(torch.zeros(0, 50), batch).shape == (0,)
