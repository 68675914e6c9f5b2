"""What happened in a simulation: latencies of requests, gaps between tokens, and how full the cache was.

Collects; the numbers for people are made in report.py. Knows no scheduler.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from scheduler.request_report import RequestReport

QUANTILES = (50, 90, 95, 99)
_UNITS_PER_SECOND = 1_000_000  # gaps are kept in whole microseconds


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds, over all samples. A percentile is the least value that as many samples do not exceed."""

    num_samples: int = 0
    mean: float = 0.0
    most: float = 0.0
    percentiles: tuple[tuple[float, float], ...] = ()  # (percent, seconds)

    def percentile(self, percent: float) -> float:
        """One of those that were computed; 0 without samples."""
        return dict(self.percentiles).get(percent, 0.0)


def distribution(samples: Iterable[float] | Mapping[float, int], extra: float | None = None) -> Distribution:
    """Sum up samples, or values with how often each occurred; `extra` is one more percentile to compute."""
    counts = samples if isinstance(samples, Mapping) else Counter(samples)
    values = sorted(counts)
    if not values:
        return Distribution()
    totals = list(accumulate(counts[value] for value in values))
    num_samples = totals[-1]
    percents = sorted({*QUANTILES, *(() if extra is None else (extra,))})
    # Rank ceil(percent / 100 * samples), in integers: 99.9 % of 1,000 is the 999th, whatever a float makes of it.
    ranks = [max(1, -(-round(percent * 1000) * num_samples // 100_000)) for percent in percents]
    return Distribution(
        num_samples,
        sum(value * counts[value] for value in values) / num_samples,
        values[-1],
        tuple((percent, values[bisect_left(totals, rank)]) for percent, rank in zip(percents, ranks, strict=True)),
    )


@dataclass(slots=True)
class Measurements:
    """Of all replicas together, as the simulation goes on."""

    ttft: list[float] = field(default_factory=list)  # seconds from arrival to the first token
    end_to_end: list[float] = field(default_factory=list)  # to the last
    queue: list[float] = field(default_factory=list)  # to the first admission
    gaps: Counter[int] = field(default_factory=Counter)  # microseconds between two tokens of an answer -> how often
    drops: Counter[str] = field(default_factory=Counter)  # by cause
    wait_seconds: Counter[str] = field(default_factory=Counter)  # by reason, over all requests
    num_prompt_tokens: int = 0  # of requests that were answered
    num_generated_tokens: int = 0
    num_refused: int = 0  # they could never run
    num_unsent: int = 0  # the turn before them was dropped or refused
    end: float = 0.0  # when the last answer was complete
    busy_seconds: float = 0.0  # of all replicas
    used_slot_seconds: float = 0.0  # slots of blocks that some sequence holds, over the time of the steps
    token_slot_seconds: float = 0.0  # of them, slots with a computed token
    slot_seconds: float = 0.0  # all slots
    row_seconds: float = 0.0  # sequences that hold blocks

    def take_gap(self, seconds: float) -> None:
        """Count the time between two tokens of one answer."""
        self.gaps[round(seconds * _UNITS_PER_SECOND)] += 1

    def take_end(self, report: RequestReport) -> None:
        """Count a request that has ended, one way or another."""
        self.wait_seconds.update(report.wait_seconds)
        if report.drop_cause is not None:
            self.drops[report.drop_cause] += 1
            return
        assert report.ended_time is not None, f"request {report.request_id} has ended, and not at any time"
        self.end = max(self.end, report.ended_time)
        self.end_to_end.append(report.ended_time - report.arrival_time)
        self.queue.append(report.queue_seconds)
        if report.first_token_time is not None:
            self.ttft.append(report.first_token_time - report.arrival_time)
        self.num_prompt_tokens += report.num_prompt_tokens
        self.num_generated_tokens += report.num_generated_tokens

    @property
    def num_answered(self) -> int:
        """Requests that got their whole answer."""
        return len(self.end_to_end)

    @property
    def num_failed(self) -> int:
        """Requests that got none, those included that were not even sent because of one that failed."""
        return self.drops.total() + self.num_refused + self.num_unsent

    @property
    def gap_seconds(self) -> dict[float, int]:
        """Gaps between tokens in seconds -> how often."""
        return {gap / _UNITS_PER_SECOND: count for gap, count in self.gaps.items()}
