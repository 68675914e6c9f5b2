"""What became of the requests that were answered: the engine's reports, kept by the answer's id for a while.

Writes one line of JSON to the log at the end of each. Holds no prompt and no answer; says to whom it may be shown by
the name of the key that asked. Knows neither HTTP nor how the engine is reached.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from scheduler.output import FinishReason
from scheduler.request_report import RequestReport
from server.api_keys import ADMIN
from server.log_lines import LogLine, RequestContext

if TYPE_CHECKING:
    from server.tracing import RequestSpan

ended_logger = logging.getLogger("octavo.ended")

MAX_ENDED_REQUESTS = 4096
MAX_KEPT_REPORTS = 16384  # of ended requests: one may have thousands of prompts
_GRACE_SECONDS = 2.0  # for the engine's last reports of a request that is answered
_DIGITS = 4  # of seconds


@dataclass(eq=False, slots=True)
class RequestTrace:
    """One request for an answer, from when it is read until its answer is sent. Times in seconds since the epoch."""

    answer_id: str  # the engine knows its prompts as `answer_id-0`, `answer_id-1` ...
    request_id: str  # of the HTTP request
    key_name: str | None
    model: str
    endpoint: str
    num_prompts: int
    created: float = field(default_factory=time.time)
    ended: float | None = None
    status: int | None = None  # of the HTTP answer, once it has been sent
    finish_reasons: Counter[FinishReason] = field(default_factory=Counter)  # as the caller sees them
    reports: dict[str, RequestReport] = field(default_factory=dict)  # of prompts that have ended in the engine
    context: RequestContext | None = None  # where it stands in a distributed trace
    span: "RequestSpan | None" = None  # that tells of it there; ended with its line

    def engine_ids(self) -> Iterable[str]:
        """What the engine calls its prompts, in their order."""
        return (f"{self.answer_id}-{position}" for position in range(self.num_prompts))

    def may_be_shown_to(self, key_name: str | None) -> bool:
        """Its own key, the admin, or anyone where it came without a key."""
        return key_name in (self.key_name, ADMIN)


class RequestHistory:
    """The requests that are being answered, and the last ones that were."""

    def __init__(
        self, *, max_ended_requests: int = MAX_ENDED_REQUESTS, max_kept_reports: int = MAX_KEPT_REPORTS
    ) -> None:
        """Forget the oldest of the ended requests beyond these numbers."""
        self._max_ended_requests = max_ended_requests
        self._max_kept_reports = max_kept_reports
        self._open: dict[str, RequestTrace] = {}  # by answer_id; until their line is written
        self._ended: OrderedDict[str, RequestTrace] = OrderedDict()
        self._num_kept_reports = 0  # of the ended ones
        self._by_request_id: dict[str, dict[str | None, str]] = {}  # -> key name -> the latest answer_id

    def open(self, trace: RequestTrace) -> RequestTrace:
        """A request is about to go to the engine. `close` must follow."""
        self._open[trace.answer_id] = trace
        self._by_request_id.setdefault(trace.request_id, {})[trace.key_name] = trace.answer_id
        return trace

    def close(self, trace: RequestTrace, status: int) -> None:
        """Its answer has been sent, with this HTTP status, or nobody waits for it any more."""
        trace.status, trace.ended = status, time.time()
        if len(trace.reports) >= trace.num_prompts:
            self._end(trace)
        else:  # those that the engine gives up report it a step later; those that it refused never do
            asyncio.get_running_loop().call_later(_GRACE_SECONDS, self._end, trace)

    def take(self, report: RequestReport) -> None:
        """What the engine says of a prompt at its end. One that nobody remembers is no error."""
        answer_id = report.request_id.rpartition("-")[0]
        trace = self._open.get(answer_id)
        if trace is None:
            return
        trace.reports[report.request_id] = report
        if trace.ended is not None and len(trace.reports) >= trace.num_prompts:
            self._end(trace)

    def find(self, name: str, key_name: str | None) -> RequestTrace | None:
        """The request with this answer id or HTTP request id, if it may be shown to `key_name`.

        Callers choose their HTTP request ids: of equal ones the asker's own comes first, and of those the latest.
        """
        trace = self._by_answer_id(name)
        if trace is not None and trace.may_be_shown_to(key_name):
            return trace
        answer_ids = self._by_request_id.get(name, {})
        answer_id = answer_ids.get(key_name)
        if answer_id is None and key_name == ADMIN:
            answer_id = next(iter(answer_ids.values()), None)
        return None if answer_id is None else self._by_answer_id(answer_id)

    def expects_reports(self, trace: RequestTrace) -> bool:
        """The engine may know more of it than what has been taken."""
        return trace.answer_id in self._open

    @property
    def num_unanswered(self) -> int:
        """Requests whose answers are not complete."""
        return sum(trace.status is None for trace in self._open.values())

    def unanswered(self, limit: int) -> list[RequestTrace]:
        """Of those, the oldest."""
        return list(islice((trace for trace in self._open.values() if trace.status is None), limit))

    def last_ended(self, limit: int) -> list[RequestTrace]:
        """The last ones that ended, the newest first."""
        return list(islice(reversed(self._ended.values()), limit))

    def flush(self) -> None:
        """Write the lines that wait for a last word of the engine: there is none any more."""
        for trace in list(self._open.values()):
            if trace.ended is not None:
                self._end(trace)

    def _by_answer_id(self, answer_id: str) -> RequestTrace | None:
        return self._open.get(answer_id) or self._ended.get(answer_id)

    def _end(self, trace: RequestTrace) -> None:
        if self._open.pop(trace.answer_id, None) is None:
            return  # the line was written before its time was up
        ended_logger.info(LogLine("Request ended.", end_record(trace)))
        if trace.span is not None:
            trace.span.end(trace)
            trace.span = None  # it is sent, and need not be kept as long as the request is
        self._ended[trace.answer_id] = trace
        self._num_kept_reports += len(trace.reports)
        while len(self._ended) > self._max_ended_requests or (
            self._num_kept_reports > self._max_kept_reports and len(self._ended) > 1
        ):
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        answer_id, trace = self._ended.popitem(last=False)
        self._num_kept_reports -= len(trace.reports)
        answer_ids = self._by_request_id.get(trace.request_id, {})
        if answer_ids.get(trace.key_name) == answer_id:
            del answer_ids[trace.key_name]
        if not answer_ids:
            self._by_request_id.pop(trace.request_id, None)


def end_record(trace: RequestTrace) -> dict[str, Any]:
    """One request as a line of the log: tokens of all its prompts, and the longest of their times."""
    reports = list(trace.reports.values())
    waits: dict[str, float] = {}
    for report in reports:
        for reason, seconds in report.wait_seconds.items():
            waits[reason] = max(waits.get(reason, 0.0), round(seconds, _DIGITS))
    return {
        "id": trace.answer_id,
        "request_id": trace.request_id,
        "key": trace.key_name,
        "model": trace.model,
        "endpoint": trace.endpoint,
        "status": trace.status,
        "finish_reasons": dict(trace.finish_reasons),
        "drop_causes": Counter(report.drop_cause for report in reports if report.drop_cause is not None),
        "priority": max((report.priority for report in reports), default=None),
        "prompts": trace.num_prompts,
        "prompt_tokens": sum(report.num_prompt_tokens for report in reports),
        "cached_tokens": sum(report.num_cached_tokens for report in reports),
        "completion_tokens": sum(report.num_generated_tokens for report in reports),
        "recomputed_tokens": sum(report.num_recomputed_tokens for report in reports),
        "seconds": round(max(0.0, (trace.ended or time.time()) - trace.created), _DIGITS),
        "queue_seconds": _longest(report.queue_seconds for report in reports),
        "prefill_seconds": _longest(report.prefill_seconds for report in reports),
        "decode_seconds": _longest(report.decode_seconds for report in reports),
        "wait_seconds": waits,
        "preemptions": sum(report.num_preemptions for report in reports),
        "preemption_causes": Counter(p.cause for report in reports for p in report.preemptions),
        **({} if trace.context is None else trace.context.trace_fields()),
    }


def _longest(seconds: Iterable[float | None]) -> float | None:
    longest = max((s for s in seconds if s is not None), default=None)
    return None if longest is None else round(longest, _DIGITS)
