"""How many replicas a trace needs: the least number whose latencies stay within a service-level objective.

Simulates one number after the other; knows neither files nor tables.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from scheduler.simulate.deployment import Deployment
from scheduler.simulate.measurements import Measurements
from scheduler.simulate.replay import Replay
from scheduler.simulate.report import Report, build_report
from scheduler.simulate.traces import Trace


@dataclass(frozen=True, slots=True)
class Objective:
    """What share of requests must be how fast. None = no bound on that latency."""

    percentile: float  # 0 < percentile <= 100
    ttft: float | None = None  # seconds
    inter_token: float | None = None  # of all gaps between tokens

    def num_allowed_misses(self, num_requests: int) -> int:
        """Requests that may take longer."""
        return math.floor(num_requests * (100 - self.percentile) / 100 + 1e-9)

    def allows_gaps_of(self, report: Report) -> bool:
        """Its answers came fast enough, once they had begun."""
        return self.inter_token is None or report.inter_token.percentile(self.percentile) <= self.inter_token


@dataclass(frozen=True, slots=True)
class Trial:
    """One number of replicas. A trial that was given up has a report of its part of the trace."""

    num_replicas: int
    is_met: bool
    is_complete: bool
    report: Report


@dataclass(frozen=True, slots=True)
class Sizing:
    """The trials in the order in which they were made."""

    objective: Objective
    num_replicas: int | None  # None = not even the most that were allowed
    trials: tuple[Trial, ...]

    @property
    def chosen(self) -> Report | None:
        """The report of the least number that meets the objective."""
        return next((trial.report for trial in self.trials if trial.num_replicas == self.num_replicas), None)


class MissCounter:
    """Counts requests whose first token came too late or never, each once: to be asked again and again."""

    def __init__(self, objective: Objective, num_requests: int) -> None:
        """Of `num_requests` none has ended."""
        self._ttft = math.inf if objective.ttft is None else objective.ttft
        self._num_allowed = objective.num_allowed_misses(num_requests)
        self._num_seen = 0
        self._num_late = 0

    def __call__(self, measured: Measurements) -> bool:
        """More have missed the objective already than may in the end."""
        new = measured.ttft[self._num_seen :]
        self._num_seen += len(new)
        self._num_late += sum(seconds > self._ttft for seconds in new)
        return self._num_late + measured.num_failed > self._num_allowed


def try_replicas(
    trace: Trace,
    deployment: Deployment,
    objective: Objective,
    num_replicas: int,
    advance: Callable[[int], None] = lambda _: None,
) -> Trial:
    """Replay the trace with this many replicas, until it is over or too many requests were late."""
    tried = replace(deployment, num_replicas=num_replicas)
    start = time.perf_counter()
    misses = MissCounter(objective, trace.num_requests)
    replayed = Replay(trace, tried).run(advance=advance, gives_up=misses)
    report = build_report(trace, tried, replayed, time.perf_counter() - start, objective.percentile)
    is_met = replayed.is_complete and not misses(replayed.measurements) and objective.allows_gaps_of(report)
    return Trial(num_replicas, is_met, replayed.is_complete, report)


def size(attempt: Callable[[int], Trial], objective: Objective, max_replicas: int) -> Sizing:
    """The least number of replicas: doubled until the objective is met, then halved between.

    Takes for granted that more replicas are never slower.
    """
    trials: list[Trial] = []

    def is_met(num_replicas: int) -> bool:
        trials.append(attempt(num_replicas))
        return trials[-1].is_met

    below, enough = 0, 1
    while not is_met(enough):
        if enough >= max_replicas:
            return Sizing(objective, None, tuple(trials))
        below, enough = enough, min(2 * enough, max_replicas)
    while enough - below > 1:
        middle = (below + enough) // 2
        below, enough = (below, middle) if is_met(middle) else (middle, enough)
    return Sizing(objective, enough, tuple(trials))
