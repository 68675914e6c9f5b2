"""What the engine's load means to those who wait: how long until there is room, and who waits too long and why.

Is told of steps and ends by the engine; decides nothing, and knows neither HTTP nor the scheduler's queues.
"""

import logging
from collections.abc import Iterable, Sequence

from scheduler.request_report import RequestReport, Starvation, WaitReason
from scheduler.stats import SchedulerStats
from scheduler.throughput import Throughput
from server.log_lines import LogLine

logger = logging.getLogger("octavo.engine")

_MAX_LOGGED = 8  # starving requests in a row; after them only their number
_REASONS: dict[WaitReason, str] = {
    "grammar": "its grammar is being compiled",
    "behind_others": "others go before it",
    "max_num_seqs": "as many sequences run as --max-num-seqs allows",
    "kv_blocks": "too few KV blocks are free",
    "token_budget": "the steps are full (--max-num-batched-tokens)",
    "preempted": "it gave way to another request and has not got its place back",
}


class EngineLoad:
    """Measures how fast the engine works off what waits."""

    def __init__(self) -> None:
        """Nothing has been measured, and nothing runs."""
        self._throughput = Throughput()
        self._is_idle = True

    def begins_step(self, now: float) -> None:
        """A step is scheduled. The time since the one before counts unless there was nothing to do in between."""
        if self._is_idle:
            self._throughput.resume(now)
        self._is_idle = False

    def ends_step(self, num_tokens: int, now: float, *, is_last: bool) -> None:
        """A step has brought its result; `is_last`: nothing is left to do."""
        self._throughput.observe(num_tokens, now)
        self._is_idle = is_last

    def rests(self) -> None:
        """There is nothing to do, whatever the last step left: the time until work comes does not count."""
        self._is_idle = True

    def take(self, reports: Iterable[RequestReport]) -> None:
        """Learn from requests that have ended how long answers are."""
        for report in reports:
            if report.state == "finished" and report.num_generated_tokens:
                self._throughput.observe_end(report.num_generated_tokens)

    def seconds_until_served(self, stats: SchedulerStats) -> float | None:
        """How long the engine needs for what waits now, by the speed of its last steps; None before any was timed."""
        return self._throughput.seconds_for(stats.num_queued_tokens, stats.num_waiting)


def log_starving(starving: Sequence[Starvation]) -> None:
    """Tell the operator of requests that have just come to wait for too long."""
    for each in starving[:_MAX_LOGGED]:
        owner = f" of {each.tenant}" if each.tenant else ""
        told = (
            f"Request {each.request_id}{owner} (priority {each.priority}) has waited for {each.seconds:.0f} s: "
            f"{_REASONS[each.reason]}."
        )
        fields = {
            "id": each.request_id.rpartition("-")[0],
            "key": each.tenant or None,
            "priority": each.priority,
            "wait_seconds": round(each.seconds, 3),
            "wait_reason": each.reason,
        }
        logger.warning(LogLine(told, fields, told))
    if len(starving) > _MAX_LOGGED:
        logger.warning("%d more requests have waited as long.", len(starving) - _MAX_LOGGED)
