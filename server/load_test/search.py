"""Finds the highest rate at which a server keeps its objective: doubling until it breaks, then halving the gap.

Pure search; what a trial is, the caller knows. No clock, no HTTP.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import sqrt

MAX_TRIALS = 40


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

    rate: float | None  # kept in two trials; None: not even the lowest rate tried is kept
    broken_rate: float | None  # the lowest rate seen to break above it; None: none did up to the limit
    trials: tuple[Trial, ...]
    is_complete: bool  # whether the two lie as close as was asked for


async def find_rate(
    attempt: Callable[[float], Awaitable[Trial | None]],
    *,
    start: float,
    least: float,
    most: float,
    precision: float,
) -> Found:
    """Search between `least` and `most` sessions per second.

    A rate counts as found when a second trial, with other arrivals, keeps it too: one lucky draw is not enough. One
    that breaks the second time becomes the upper end of what is searched.

    Args:
        attempt: tries a rate; each call draws anew. None ends the search.
        start: the first rate.
        least: below it the search gives up.
        most: above it the search does not go.
        precision: the two ends are close enough when their ratio is at most 1 + precision.
    """
    search = _Search(attempt, most)
    rate = min(max(start, least), most)
    while len(search.trials) < MAX_TRIALS:
        if not await search.try_rate(rate):
            break
        kept, broken = search.kept, search.broken
        if kept is None:
            if broken is not None and broken <= least:
                break
            rate = max(least, (broken or rate) / 2)
        elif broken is None and kept < most:
            rate = min(most, kept * 2)
        elif broken is not None and broken / kept > 1 + precision:
            rate = sqrt(kept * broken)
        elif search.num_kept(kept) >= 2:
            break
        else:
            rate = kept
    kept = search.kept
    is_confirmed = kept is not None and search.num_kept(kept) >= 2
    is_close = kept is not None and (kept >= most or (search.broken or 0.0) / kept <= 1 + precision)
    return Found(kept, search.broken, tuple(search.trials), is_confirmed and is_close)


class _Search:
    """What is known so far."""

    def __init__(self, attempt: Callable[[float], Awaitable[Trial | None]], most: float) -> None:
        self.trials: list[Trial] = []
        self._attempt = attempt
        self._most = most

    @property
    def broken(self) -> float | None:
        """The lowest rate that broke in any trial."""
        return min((trial.rate for trial in self.trials if not trial.is_kept), default=None)

    @property
    def kept(self) -> float | None:
        """The highest rate that was kept, below all that broke."""
        limit = self.broken or float("inf")
        return max((trial.rate for trial in self.trials if trial.is_kept and trial.rate < limit), default=None)

    def num_kept(self, rate: float) -> int:
        """Trials of exactly this rate that kept it."""
        return sum(trial.is_kept and trial.rate == rate for trial in self.trials)

    async def try_rate(self, rate: float) -> bool:
        """Whether there was a trial."""
        trial = await self._attempt(rate)
        if trial is not None:
            self.trials.append(trial)
        return trial is not None
