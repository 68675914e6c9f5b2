"""The fit of the cost model finds the terms that made up the times."""

import random

import pytest

from benchmarks.step_cost_fit import MeasuredStep, fit_steps, quality
from scheduler.simulate.step_cost import FittedCost, StepWork

TRUE = FittedCost("made up", ((1, 0.02), (8, 0.03), (64, 0.2), (512, 1.0)), 1e-4, 2e-6, 3e-8)


def made_up_steps(count, seed, noise=0.0, held_up=0.0):
    """Steps of all kinds whose times are those of TRUE; a share of them is held up by something else."""
    chance = random.Random(seed)
    steps = []
    for _ in range(count):
        num_rows = chance.choice((1, 2, 4, 8, 16, 32, 64))
        num_tokens = num_rows if chance.random() < 0.5 else chance.randint(num_rows, 512)
        context = num_tokens + num_rows * chance.randint(0, 1000)
        pairs = 0.0 if num_tokens == num_rows else num_tokens * chance.uniform(1, 1000)
        work = StepWork(num_rows, num_tokens, context, pairs)
        late = 5.0 if chance.random() < held_up else 1.0
        steps.append(MeasuredStep(work, TRUE.seconds(work) * late * (1 + noise * chance.uniform(-1, 1))))
    return steps


def test_exact_times_are_explained_exactly():
    model = fit_steps(made_up_steps(600, 0), "test")
    assert quality(model, made_up_steps(200, 1)).p90_error < 0.02


@pytest.mark.parametrize("seed", range(3))
def test_noise_and_steps_that_were_held_up_move_the_fit_little(seed):
    model = fit_steps(made_up_steps(600, seed, noise=0.1, held_up=0.05), "test")
    found = quality(model, made_up_steps(200, seed + 100))
    assert found.median_error < 0.05
    assert found.total_ratio == pytest.approx(1.0, abs=0.05)


def test_no_term_is_below_zero_and_the_line_never_falls():
    chance = random.Random(5)
    steps = [
        MeasuredStep(StepWork(1, tokens, tokens, 0.0), chance.uniform(1, 2))
        for tokens in range(1, 65)
        for _ in range(3)
    ]
    model = fit_steps(steps, "test", per_swapped_block=0.125)
    heights = [seconds for _, seconds in model.seconds_by_tokens]
    assert heights == sorted(heights) and heights[0] >= 0
    assert min(model.per_row, model.per_context_token, model.per_attention_pair) >= 0
    assert model.seconds_per_swapped_block == 0.125


def test_steps_of_one_size_are_not_enough():
    with pytest.raises(ValueError, match="one token"):
        fit_steps([MeasuredStep(StepWork(1, 1, 5), 1.0)] * 9, "test")
