"""Fits the simulator's model of a step to measured steps: least relative deviations, no term below zero.

Numbers in, a FittedCost out; measures nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from scheduler.simulate.step_cost import FittedCost, StepWork

_ROUNDS = 25  # of reweighting, towards least absolute deviations
_DESCENTS = 2000  # through all terms, in each round
_SMALLEST_RESIDUAL = 1e-3  # relative; below it a step weighs no more than one that is off by as much


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What a step did, and the seconds that it took."""

    work: StepWork
    seconds: float


@dataclass(frozen=True, slots=True)
class FitQuality:
    """How well a model foretells steps that it was not fitted to."""

    num_steps: int
    median_error: float  # relative, without its sign
    p90_error: float
    total_ratio: float  # foretold seconds of all steps together, over the measured ones


def fit_steps(steps: Sequence[MeasuredStep], source: str, per_swapped_block: float = 0.0) -> FittedCost:
    """The model that is off by the least share of a step's time, on average over the steps.

    A step that something else on the machine held up pulls at the fit no more than any other.

    Raises:
        ValueError: if the steps are all of one size.
    """
    knots = _knots(max(step.work.num_tokens for step in steps))
    terms = np.array([_terms(step.work, knots) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    relative = terms / seconds[:, None]
    weights = np.ones(len(steps))
    found = np.zeros(terms.shape[1])
    for _ in range(_ROUNDS):
        found = _non_negative_least_squares(relative * weights[:, None], weights)
        residuals = np.abs(relative @ found - 1)
        weights = 1 / np.sqrt(np.maximum(residuals, _SMALLEST_RESIDUAL))
    line = np.cumsum(found[: len(knots)])
    per_row, per_context_token, per_attention_pair = found[len(knots) :]
    return FittedCost(
        source,
        tuple((knot, float(at)) for knot, at in zip(knots, line, strict=True)),
        float(per_row),
        float(per_context_token),
        float(per_attention_pair),
        per_swapped_block=per_swapped_block,
    )


def quality(model: FittedCost, steps: Sequence[MeasuredStep]) -> FitQuality:
    """Compare a model with measured steps."""
    foretold = np.array([model.seconds(step.work) for step in steps])
    measured = np.array([step.seconds for step in steps])
    errors = np.abs(foretold / measured - 1)
    return FitQuality(
        len(steps),
        float(np.median(errors)),
        float(np.percentile(errors, 90)),
        float(foretold.sum() / measured.sum()),
    )


def _knots(most_tokens: int) -> list[int]:
    """1, 2, 4, 8 ... and the most tokens at the end: where the line of seconds over tokens may bend."""
    if most_tokens < 2:
        raise ValueError("every measured step computes one token: there is no line to fit")
    knots = [1]
    while 2 * knots[-1] < most_tokens:
        knots.append(2 * knots[-1])
    return [*knots, most_tokens]


def _terms(work: StepWork, knots: Sequence[int]) -> list[float]:
    """What each coefficient is multiplied with.

    The height of the line at its first knot, then how far each of its stretches is climbed: with no coefficient below
    zero it never falls.
    """
    climbed = [min(1.0, max(0.0, (work.num_tokens - left) / (right - left))) for left, right in pairwise(knots)]
    return [1.0, *climbed, work.num_rows, work.num_context_tokens, work.num_attention_pairs]


def _non_negative_least_squares(
    terms: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Coefficients >= 0 that bring `terms @ coefficients` closest to `wanted`: one after the other, round and round."""
    scale = np.sqrt((terms**2).sum(axis=0))
    scale[scale == 0] = 1.0
    scaled = terms / scale
    gram, target = scaled.T @ scaled, scaled.T @ wanted
    found = np.zeros(len(scale))
    gradient = -target
    for _ in range(_DESCENTS):
        furthest = 0.0
        for place in range(len(found)):
            step = max(-found[place], -gradient[place] / max(gram[place, place], 1e-12))
            found[place] += step
            gradient = gradient + step * gram[:, place]
            furthest = max(furthest, abs(step))
        if furthest < 1e-10:
            break
    return found / scale
