"""Finds the highest rate at which a server keeps its objective: doubling until it breaks, then halving the gap.

Pure search; what a trial is, the caller knows. No clock, no HTTP.
"""

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import sqrt

MAX_TRIALS = 40
_CONFIRMED = 2  # trials that make an end sure


@dataclass(frozen=True, slots=True)
class Trial:
    """One load at one rate."""

    rate: float  # sessions per second
    is_kept: bool
    share: float  # of the requests, served within the objective; where it was given up, the most that could be
    is_given_up: bool = False  # it could no longer be kept


@dataclass(frozen=True, slots=True)
class Found:
    """The end of a search."""

    rate: float | None  # the highest that was kept; None: not even the lowest rate tried is
    broken_rate: float | None  # the lowest above it that broke; None: none did up to the limit
    trials: tuple[Trial, ...]
    is_complete: bool  # whether the two lie as close as was asked for, each by two trials


async def find_rate(
    attempt: Callable[[float], Awaitable[Trial | None]],
    *,
    start: float,
    least: float,
    most: float,
    precision: float,
) -> Found:
    """Search between `least` and `most` sessions per second.

    Neither a lucky nor an unlucky draw of arrivals decides: when the two ends are close, each is tried again until it
    has been kept, or broken, twice. One that turns out otherwise is an end no more, and the search goes on.

    Args:
        attempt: tries a rate; each call draws anew. None ends the search.
        start: the first rate.
        least: below it the search gives up.
        most: above it the search does not go.
        precision: the two ends are close enough when their ratio is at most 1 + precision.
    """
    trials: list[Trial] = []
    rate: float | None = min(max(start, least), most)
    while rate is not None and len(trials) < MAX_TRIALS:
        trial = await attempt(rate)
        if trial is None:
            break
        trials.append(trial)
        rate = _next_rate(_Ends.of(trials), least, most, precision)
    ends = _Ends.of(trials)
    return Found(ends.kept, ends.broken, tuple(trials), is_complete=rate is None and ends.kept is not None)


@dataclass(frozen=True, slots=True)
class _Ends:
    """What the trials so far say, and how many of them at that very rate."""

    kept: float | None  # the highest rate below all that broke that did not break more often than it was kept
    num_kept: int
    broken: float | None  # the lowest rate that broke more often than it was kept
    num_broken: int

    @classmethod
    def of(cls, trials: Sequence[Trial]) -> "_Ends":
        counts: defaultdict[float, Counter[bool]] = defaultdict(Counter)
        for trial in trials:
            counts[trial.rate][trial.is_kept] += 1
        broken = min((rate for rate, count in counts.items() if count[False] > count[True]), default=None)
        below = [rate for rate, count in counts.items() if broken is None or rate < broken]
        kept = max(below, default=None)
        return cls(
            kept, 0 if kept is None else counts[kept][True], broken, 0 if broken is None else counts[broken][False]
        )


def _next_rate(ends: _Ends, least: float, most: float, precision: float) -> float | None:
    """What to try next; None at the end of the search."""
    kept, broken = ends.kept, ends.broken
    if kept is None:
        assert broken is not None, "there was a trial"
        if broken > least:
            return max(least, broken / 2)
        return None if ends.num_broken >= _CONFIRMED else broken
    if broken is None and kept < most:
        return min(most, kept * 2)
    if broken is not None and broken / kept > 1 + precision:
        return sqrt(kept * broken)
    if ends.num_kept < _CONFIRMED:
        return kept
    if broken is not None and ends.num_broken < _CONFIRMED:
        return broken
    return None
