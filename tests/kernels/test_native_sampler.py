"""The native sampler on every instruction set, against exact distributions in float64 and the sampler in torch."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.native_library import INSTRUCTION_SETS, load_library, supported_instruction_sets
from kernels.model_ops.native_ops import NativeOps
from kernels.sampling import torch_sampler
from kernels.sampling.sampling_batch import SamplingBatch
from tests.kernels.sampling_oracle import CUTS, GREEDY, assert_rows_drawn, exact_distribution, is_drawn, make_batch

# Around whole vectors of 4, 8 and 16 lanes, and whole blocks of 16 of them.
VOCAB_SIZES = [1, 5, 16, 40, 63, 64, 65, 255, 256, 257, 1000, 3001]


pytestmark = pytest.mark.usefixtures("native_library", "restored_threads")


@pytest.fixture(params=list(INSTRUCTION_SETS))
def ops(request: pytest.FixtureRequest) -> NativeOps:
    """The operations of each instruction set that this machine has."""
    if request.param not in supported_instruction_sets(load_library()):
        pytest.skip(f"this machine lacks {request.param}")
    return NativeOps(request.param)


def available(instruction_set: str) -> str:
    return instruction_set if instruction_set in supported_instruction_sets(load_library()) else "generic"


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rand(seed: int, num_rows: int) -> torch.Tensor:
    return torch.rand(num_rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spread", [0.3, 4.0])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_every_cut(ops: NativeOps, vocab_size: int, spread: float) -> None:
    """Rows of a wider tensor, whose other columns must not be read."""
    rows = [*CUTS, GREEDY] * 3
    wide = torch.full((len(rows), vocab_size + 3), torch.nan)
    logits = wide[:, :vocab_size]
    logits.copy_(randn(vocab_size, *logits.shape) * spread - 3)
    assert_rows_drawn(ops.sample, logits, rows, rand(vocab_size, len(rows)))


@settings(deadline=None, max_examples=100)
@given(
    vocab_size=st.integers(1, 700),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 2.0]),
    top_k=st.one_of(st.integers(0, 40), st.integers(600, 800)),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.11, 1.0]),
    num_levels=st.one_of(st.integers(1, 12), st.just(1 << 20)),
    instruction_set=st.sampled_from(list(INSTRUCTION_SETS)),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_row(
    vocab_size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    num_levels: int,
    instruction_set: str,
    seed: int,
) -> None:
    """Of few levels, many tokens tie at every cut, and stay together."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, num_levels, (1, vocab_size), generator=generator) / num_levels * 12 - 3
    uniform = torch.rand(1, dtype=torch.float64, generator=generator)
    batch = make_batch([(temperature, top_k, top_p, min_p)], uniform)
    drawn = int(NativeOps(available(instruction_set)).sample(logits, batch))
    # The mass at a cut may equal what is asked for but for rounding: the token below it then is kept or is not.
    nearly = {top_p, top_p * (1 - 1e-6), top_p * (1 + 1e-6)} if top_p < 1 else {top_p}
    exact = [exact_distribution(logits[0], temperature, top_k, p, min_p) for p in nearly]
    assert any(is_drawn(drawn, probs, float(uniform)) for probs in exact)


@pytest.mark.parametrize("params", [CUTS[0], CUTS[4]], ids=str)
def test_a_grid_of_numbers_draws_every_kept_token(ops: NativeOps, params: tuple[float, int, float, float]) -> None:
    num_draws = 60
    logits = torch.tensor([2.0, -torch.inf, 1.0, 0.5, -30.0, 0.1, -1.0, -3.0]).expand(num_draws, -1)
    uniform = (torch.arange(num_draws) + 0.5) / num_draws
    token_ids = assert_rows_drawn(ops.sample, logits.contiguous(), [params] * num_draws, uniform)
    assert (token_ids.diff() >= 0).all()  # in the order of the vocabulary
    probs = exact_distribution(logits[0], *params)
    assert set(np.flatnonzero(probs > 1 / num_draws)) <= set(token_ids.tolist())


def test_ties_at_a_cut_stay_together(ops: NativeOps) -> None:
    """Few different logits, so that every cut falls among equal ones: the same tokens as the sampler in torch."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(0, 5, (30, 300), generator=generator).float()
    params = [(1.0, 0, 0.5, 0.0), (1.0, 10, 1.0, 0.0), (1.0, 100, 0.9, 0.05)] * 10
    batch = make_batch(params, rand(1, 30))
    assert torch.equal(ops.sample(logits, batch), torch_sampler.sample(logits, batch))


def test_a_large_flat_vocabulary_is_drawn_as_in_torch(ops: NativeOps) -> None:
    """More tokens are kept than there are groups of 16, and more than one sweep of the bisection takes."""
    logits = randn(5, 4, 30_000) * 0.8
    params = [(1.0, 0, 0.95, 0.0), (1.0, 5000, 1.0, 0.0), (1.5, 29_999, 0.999, 0.0), (1.0, 9, 0.5, 0.0)]
    batch = make_batch(params, rand(5, 4))
    assert_rows_drawn(ops.sample, logits, params, batch.uniform)
    assert torch.equal(ops.sample(logits, batch), torch_sampler.sample(logits, batch))


def test_the_likeliest_of_equals_is_the_first(ops: NativeOps) -> None:
    logits = torch.zeros(3, 3000)
    logits[0, [100, 1007, 2000]] = 9.0
    logits[1, [1100, 2999]] = 9.0
    batch = make_batch([GREEDY] * 3, torch.zeros(3))
    assert ops.sample(logits, batch).tolist() == [100, 1100, 0]
    assert ops.sample(logits, dataclasses.replace(batch, all_greedy=True)).tolist() == [100, 1100, 0]


@pytest.mark.parametrize("last", [75, 990])  # of the same block of tokens and of another
def test_tokens_without_mass_are_never_drawn(ops: NativeOps, last: int) -> None:
    logits = torch.full((4, 1000), -torch.inf)
    logits[:, [70, last]] = 5.0
    ends = torch.tensor([0.0, 0.5 - 2.0**-20, 0.5, 1.0 - 2.0**-53], dtype=torch.float64)
    for params in (CUTS[0], CUTS[4], CUTS[8]):
        assert ops.sample(logits, make_batch([params] * 4, ends)).tolist() == [70, 70, last, last]


@pytest.mark.parametrize("vocab_size", [50, 257])
def test_rows_that_have_no_distribution_take_the_likeliest(ops: NativeOps, vocab_size: int) -> None:
    """As torch.argmax has it: NaN before everything, and of equals the first."""
    logits = randn(2, 7, vocab_size)
    logits[0] = -torch.inf
    logits[1] = torch.nan
    logits[2, [3, 9]] = torch.inf
    logits[3, [20, 30]] = torch.nan
    logits[4] *= 1e37
    logits[5] = torch.finfo(torch.float32).min
    logits[5, 7] = torch.finfo(torch.float32).max
    expected = [0, 0, 3, 20, *logits[4:].argmax(dim=-1).tolist()]
    uniform = torch.full((7,), 0.999)
    assert ops.sample(logits, make_batch([CUTS[4]] * 6 + [(1e-38, 3, 0.9, 0.1)], uniform)).tolist() == expected
    assert ops.sample(logits, make_batch([GREEDY] * 7, uniform)).tolist() == expected


def test_a_row_does_not_depend_on_its_batch(ops: NativeOps) -> None:
    """Nor on the number of threads, nor on how far apart rows lie."""
    rows = [*CUTS, GREEDY] * 2
    logits, uniform = randn(3, len(rows), 1500) * 2, rand(3, len(rows))
    targets = torch.randint(0, 1500, (len(rows),), generator=torch.Generator().manual_seed(4))
    torch.set_num_threads(3)
    together, scores = ops.sample(logits, make_batch(rows, uniform)), ops.token_logprobs(logits, targets, 7)
    torch.set_num_threads(1)
    for row in range(len(rows)):
        own = slice(row, row + 1)
        assert ops.sample(logits[own], make_batch(rows[own], uniform[own])).item() == together[row].item()
        for alone, of_all in zip(ops.token_logprobs(logits[own].clone(), targets[own], 7), scores, strict=True):
            assert torch.equal(alone, of_all[own])


def test_no_rows(ops: NativeOps) -> None:
    nothing = torch.zeros(0)
    batch = SamplingBatch(nothing, nothing.long(), nothing, nothing, nothing.double(), all_greedy=False)
    assert ops.sample(torch.zeros(0, 50), batch).shape == (0,)
    assert [part.shape for part in ops.token_logprobs(torch.zeros(0, 50), nothing.long(), 3)] == [(0,), (0, 3), (0, 3)]


# --- log-probabilities ---


@pytest.mark.parametrize("num_top", [0, 1, 20, 10**9])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_log_probabilities(ops: NativeOps, vocab_size: int, num_top: int) -> None:
    """Of the tokens asked for and the best, on rows of a wider tensor; equals in the order of their ids."""
    num_top = min(num_top, vocab_size)
    wide = torch.full((6, vocab_size + 3), torch.nan)
    logits = wide[:, 1 : vocab_size + 1]
    logits.copy_(randn(vocab_size, 6, vocab_size) * 4)
    logits[3:].round_()  # many equals, zeros of both signs among them
    logits[5, ::3] = -torch.inf if vocab_size > 1 else 0.0
    logits[5, -1] = 1.0
    targets = torch.randint(0, vocab_size, (6,), generator=torch.Generator().manual_seed(num_top))
    exact = torch.log_softmax(logits.double(), dim=-1)
    logprobs, top_ids, top_logprobs = ops.token_logprobs(logits, targets, num_top)
    best, ids = exact.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(top_ids, ids[:, :num_top])
    torch.testing.assert_close(top_logprobs.double(), best[:, :num_top], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logprobs.double(), exact.gather(1, targets[:, None])[:, 0], rtol=1e-6, atol=1e-6)
    none, same_ids, same_logprobs = ops.token_logprobs(logits, None, num_top)
    assert none.shape == (0,) and torch.equal(same_ids, top_ids) and torch.equal(same_logprobs, top_logprobs)


def test_log_probabilities_of_a_row_that_has_no_distribution(ops: NativeOps) -> None:
    """They are not numbers, as in torch; the ids are of the vocabulary, none twice."""
    logits = randn(6, 3, 600)
    logits[0] = -torch.inf
    logits[1, [5, 500]] = torch.tensor([torch.nan, -torch.nan])
    logits[2, 599] = torch.inf
    logprobs, top_ids, _ = ops.token_logprobs(logits, torch.tensor([3, 5, 599]), 20)
    assert logprobs.isnan().all()
    for ids in top_ids.tolist():
        assert len(set(ids)) == 20 and set(ids) <= set(range(600))


def test_more_of_the_best_change_no_order(ops: NativeOps) -> None:
    logits = torch.randint(0, 6, (3, 2000), generator=torch.Generator().manual_seed(7)).float()
    _, few, _ = ops.token_logprobs(logits, None, 5)
    _, many, _ = ops.token_logprobs(logits, None, 300)
    assert torch.equal(few, many[:, :5])
