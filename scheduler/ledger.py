"""What happened to each request and when: queued why, admitted with which cached prefix, preempted by whom, ended how.

Keeps the books alone: the scheduler tells it what it has done, and decides nothing by it. Costs a few dictionary
look-ups per event and nothing per step and running sequence. Must not know how the reports are shown.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from paged_cache.prefix_cache import CachedPrefix
from scheduler.output import Dropped, FinishReason
from scheduler.request import Request, Sequence, SequenceStatus
from scheduler.request_report import (
    Preemption,
    PreemptionCause,
    RequestReport,
    RequestState,
    SequenceReport,
    Starvation,
    WaitReason,
)

MAX_REPORTED_PREEMPTIONS = 32
MAX_REPORTED_SEQUENCES = 32
MAX_REPORTED_BLOCKS = 1024  # of one sequence

_STATES: dict[SequenceStatus, RequestState] = {
    SequenceStatus.WAITING_FOR_GRAMMAR: "waiting_for_grammar",
    SequenceStatus.WAITING: "waiting",
    SequenceStatus.RUNNING: "running",
    SequenceStatus.PREEMPTED: "preempted",
    SequenceStatus.FINISHED: "finished",
}
_WAITING = (SequenceStatus.WAITING_FOR_GRAMMAR, SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
_OF_THE_HEAD = ("max_num_seqs", "kv_blocks", "token_budget")  # reasons that hold only for the one whose turn it is


@dataclass(eq=False, slots=True)
class _Record:
    """One request's books."""

    request: Request
    queued_time: float
    wait_reason: WaitReason | None = None
    wait_began: float = 0.0  # whatever its reasons were since
    reason_began: float = 0.0
    wait_seconds: dict[WaitReason, float] = field(default_factory=dict)  # of what is over
    admitted_time: float | None = None
    first_token_time: float | None = None
    num_cached_tokens: int = 0
    first_difference: int | None = None
    num_preemptions: int = 0
    preemptions: list[Preemption] = field(default_factory=list)
    num_recomputed_tokens: int = 0  # of beams that were given up
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)  # by sequence index
    last_end_time: float = 0.0


class RequestLedger:
    """The books of all requests that have not been taken by `take_ended`; ended ones pile up until they are."""

    def __init__(self, starving_seconds: float) -> None:
        """Report requests as starving that have waited `starving_seconds` at a stretch; 0 = never."""
        self._starving_seconds = starving_seconds
        self._records: dict[str, _Record] = {}  # by request_id
        self._waiting: dict[str, _Record] = {}  # those that wait and do not starve yet; the longest wait first
        self._starving: dict[str, _Record] = {}  # those that have been reported
        self._head: _Record | None = None  # whose turn it is, and which cannot be admitted
        self._ending: dict[str, _Record] = {}  # a sequence has ended since these were looked at; perhaps the last
        self._ended: list[RequestReport] = []

    @property
    def num_starving(self) -> int:
        """Requests that `starving` has reported and that still wait."""
        return len(self._starving)

    # --- what the scheduler tells ---

    def queued(self, request: Request, now: float) -> None:
        """It passed the scheduler's door, and waits behind others until told otherwise."""
        former = self._records.get(request.request_id)
        if former is not None:  # its id is free again, and its books have not been taken
            self._close(former, former.last_end_time)
        record = _Record(request, now)
        self._records[request.request_id] = record
        is_deferred = any(s.status is SequenceStatus.WAITING_FOR_GRAMMAR for s in request.sequences)
        self._begin_wait(record, "grammar" if is_deferred else "behind_others", now)

    def waits(self, request: Request, reason: WaitReason, now: float) -> None:
        """Why it waits as of now. Whoever was held up at the head of the queue before it stands behind it."""
        record = self._records.get(request.request_id)
        if record is None:
            return
        if reason in _OF_THE_HEAD and self._head is not record:
            if self._head is not None and self._head.wait_reason in _OF_THE_HEAD:
                self._change_reason(self._head, _reason_behind(self._head.request), now)
            self._head = record
        if record.wait_reason is None:
            self._begin_wait(record, reason, now)
        elif record.wait_reason != reason:
            self._change_reason(record, reason, now)

    def admitted(self, sequence: Sequence, now: float, cached: CachedPrefix) -> None:
        """One of its sequences runs, for the first time or again. `cached` counts for the request's first only."""
        record = self._records.get(sequence.request.request_id)
        if record is None:
            return
        if record.admitted_time is None:
            record.admitted_time = now
            record.num_cached_tokens = cached.num_tokens
            record.first_difference = cached.first_difference
        self._end_wait_without(record, sequence, now)

    def preempted(self, sequence: Sequence, now: float, by: Sequence, cause: PreemptionCause, is_swapped: bool) -> None:
        """It loses its blocks; to be told while the sequence still has its number of computed tokens."""
        record = self._records.get(sequence.request.request_id)
        if record is None:
            return
        record.num_preemptions += 1
        if len(record.preemptions) < MAX_REPORTED_PREEMPTIONS:
            num_lost_tokens = 0 if is_swapped else sequence.num_computed_tokens
            record.preemptions.append(
                Preemption(
                    now, sequence.index, by.request.request_id, by.request.tenant, cause, num_lost_tokens, is_swapped
                )
            )
        if record.wait_reason is None:
            self._begin_wait(record, "preempted", now)

    def first_token(self, request: Request, now: float) -> None:
        """A token of it was sampled; those after the first change nothing."""
        record = self._records.get(request.request_id)
        if record is not None and record.first_token_time is None:
            record.first_token_time = now

    def ended(self, sequence: Sequence, now: float, finish_reason: FinishReason) -> None:
        """One of its sequences has ended. The request has when `take_ended` finds that all of them have."""
        record = self._records.get(sequence.request.request_id)
        if record is None:
            return
        record.finish_reasons[sequence.index] = finish_reason
        self._end_one(record, sequence, now)

    def given_up(self, sequence: Sequence, now: float) -> None:
        """A beam is none of the answers, and its request is left without it."""
        record = self._records.get(sequence.request.request_id)
        if record is not None:
            record.num_recomputed_tokens += sequence.num_recomputed_tokens
            self._end_one(record, sequence, now)

    def dropped(self, request: Request, dropped: Dropped, now: float) -> None:
        """It was ended for want of room or time, perhaps before it was queued."""
        record = self._records.get(request.request_id)
        if record is None:
            record = self._records[request.request_id] = _Record(request, now)
        self._close(record, now, dropped)

    # --- what others ask ---

    def report(self, request_id: str, now: float) -> RequestReport | None:
        """Of a request that has not been taken yet, as of now; None if there is none of this id."""
        record = self._records.get(request_id)
        if record is not None:
            return _report(record, now)
        return next((report for report in reversed(self._ended) if report.request_id == request_id), None)

    def take_ended(self) -> list[RequestReport]:
        """The requests that have ended since the last call; the ledger forgets them. To be called between steps."""
        ending, self._ending = self._ending, {}
        for record in ending.values():
            if all(s.status is SequenceStatus.FINISHED for s in record.request.sequences):
                self._close(record, record.last_end_time)
        ended, self._ended = self._ended, []
        return ended

    def starving(self, now: float) -> list[Starvation]:
        """Those that began to starve since the last call: each wait is reported once. Cheap to ask each step."""
        if self._starving_seconds <= 0:
            return []
        found = []
        for request_id, record in self._overdue(now):
            del self._waiting[request_id]
            self._starving[request_id] = record
            assert record.wait_reason is not None
            request = record.request
            found.append(
                Starvation(request_id, request.tenant, request.priority, record.wait_reason, now - record.wait_began)
            )
        return found

    def check_integrity(self) -> None:
        """Prove that every request that waits is in one list of those that do.

        Raises:
            AssertionError: naming the request at fault.
        """
        for request_id, record in self._records.items():
            places = (self._waiting.get(request_id) is record) + (self._starving.get(request_id) is record)
            assert places == (record.wait_reason is not None), f"the ledger lost the wait of {request_id}"
        assert self._waiting.keys() | self._starving.keys() | self._ending.keys() <= self._records.keys()

    # --- waits ---

    def _overdue(self, now: float) -> list[tuple[str, _Record]]:
        found = []
        for request_id, record in self._waiting.items():
            if now - record.wait_began < self._starving_seconds:
                break
            found.append((request_id, record))
        return found

    def _begin_wait(self, record: _Record, reason: WaitReason, now: float) -> None:
        record.wait_reason = reason
        record.wait_began = record.reason_began = now
        self._waiting[record.request.request_id] = record

    def _change_reason(self, record: _Record, reason: WaitReason | None, now: float) -> None:
        former = record.wait_reason
        if former is not None:
            seconds = record.wait_seconds.get(former, 0.0)
            record.wait_seconds[former] = seconds + max(0.0, now - record.reason_began)
        record.wait_reason, record.reason_began = reason, now

    def _end_wait_without(self, record: _Record, sequence: Sequence, now: float) -> None:
        """It waits no longer, unless another of its sequences does."""
        if record.wait_reason is None:
            return
        if not any(other.status in _WAITING for other in record.request.sequences if other is not sequence):
            self._end_wait(record, now)

    def _end_one(self, record: _Record, sequence: Sequence, now: float) -> None:
        record.last_end_time = now
        self._ending[record.request.request_id] = record
        self._end_wait_without(record, sequence, now)

    def _end_wait(self, record: _Record, now: float) -> None:
        self._change_reason(record, None, now)
        self._waiting.pop(record.request.request_id, None)
        self._starving.pop(record.request.request_id, None)
        if self._head is record:
            self._head = None

    def _close(self, record: _Record, now: float, dropped: Dropped | None = None) -> None:
        """Write the last report of a request, and forget it."""
        self._end_wait(record, now)
        request_id = record.request.request_id
        self._ending.pop(request_id, None)
        del self._records[request_id]
        self._ended.append(_report(record, now, dropped, has_ended=True))


def _reason_behind(request: Request) -> WaitReason:
    """Why a request waits whose turn it is not."""
    has_run = any(sequence.status is SequenceStatus.PREEMPTED for sequence in request.sequences)
    return "preempted" if has_run else "behind_others"


def _report(record: _Record, now: float, dropped: Dropped | None = None, *, has_ended: bool = False) -> RequestReport:
    request = record.request
    wait_seconds = dict(record.wait_seconds)
    if record.wait_reason is not None:
        seconds = wait_seconds.get(record.wait_reason, 0.0)
        wait_seconds[record.wait_reason] = seconds + max(0.0, now - record.reason_began)
    generated = [s.num_generated_tokens for s in request.sequences]
    return RequestReport(
        request_id=request.request_id,
        tenant=request.tenant,
        priority=request.priority,
        state="dropped" if dropped is not None else _state_of(request.sequences),
        arrival_time=request.arrival_time,
        queued_time=record.queued_time,
        report_time=now,
        num_prompt_tokens=len(request.prompt_token_ids),
        wait_seconds=wait_seconds,
        wait_reason=record.wait_reason,
        admitted_time=record.admitted_time,
        first_token_time=record.first_token_time,
        ended_time=now if has_ended else None,
        num_cached_tokens=record.num_cached_tokens,
        first_difference=record.first_difference,
        num_generated_tokens=sum(generated),
        max_generated_tokens=max(generated, default=0),
        num_recomputed_tokens=record.num_recomputed_tokens + sum(s.num_recomputed_tokens for s in request.sequences),
        num_preemptions=record.num_preemptions,
        preemptions=tuple(record.preemptions),
        sequences=tuple(_sequence_report(s, record) for s in request.sequences[:MAX_REPORTED_SEQUENCES]),
        drop_cause=None if dropped is None else dropped.cause,
    )


def _state_of(sequences: Iterable[Sequence]) -> RequestState:
    """Of the request: that of the sequence which is furthest from its end, a running one before those that wait."""
    statuses = {sequence.status for sequence in sequences}
    for status in (
        SequenceStatus.RUNNING,
        SequenceStatus.PREEMPTED,
        SequenceStatus.WAITING_FOR_GRAMMAR,
        SequenceStatus.WAITING,
    ):
        if status in statuses:
            return _STATES[status]
    return "finished" if statuses else "waiting"


def _sequence_report(sequence: Sequence, record: _Record) -> SequenceReport:
    block_ids = sequence.block_table.block_ids
    return SequenceReport(
        index=sequence.index,
        state=_STATES[sequence.status],
        num_tokens=sequence.num_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        num_recomputed_tokens=sequence.num_recomputed_tokens,
        num_blocks=len(block_ids),
        block_ids=tuple(block_ids[:MAX_REPORTED_BLOCKS]),
        num_host_blocks=len(getattr(sequence.block_table, "host_block_ids", ())),
        finish_reason=record.finish_reasons.get(sequence.index),
    )
