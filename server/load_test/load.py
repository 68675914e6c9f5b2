"""Sends what was planned, in an open or a closed loop, and keeps a record of each request.

Open loop: a session starts when it is due, however long the answers before it take. Closed loop: a number of users,
each of whom starts the next session when the last has ended. Latency counts from when a request was due, so that what
a stalled server makes others wait for is seen (no coordinated omission). Knows no statistics.
"""

import asyncio
import gc
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from server.load_test.answer import Answer
from server.load_test.client import Client
from server.load_test.exchange_errors import ExchangeFailed
from server.load_test.metronome import Metronome
from server.load_test.plan import Plan, PlannedRequest, PlannedSession
from server.load_test.record import Record
from server.load_test.request_form import RequestForm, Talk

_HEAD_START = 0.2  # seconds for the first bodies to be made
_AHEAD_BYTES = 256 << 20  # bodies that are made before the load begins; the others one ahead
_ABANDONED = "stopped"


class TooLate(ValueError):
    """The load could not start when it was to; the message is for the person who named the time."""


class Load:
    """One plan against one server, once."""

    def __init__(
        self,
        client: Client,
        form: RequestForm,
        plan: Plan,
        *,
        num_users: int | None = None,
        max_concurrency: int | None = None,
        duration: float | None = None,
        start_at: float | None = None,
        on_record: Callable[[Record], None] = lambda _: None,
    ) -> None:
        """Prepare.

        Args:
            client: of the server.
            form: of all requests.
            plan: what is asked.
            num_users: a closed loop of so many; None: an open loop.
            max_concurrency: in an open loop, requests that may be open at once; others wait, and count that as latency.
            duration: seconds after which a closed loop starts no further request; what is open is waited for.
            start_at: when it starts, by `time.time()`, for clients that start together; None: as soon as it can.
            on_record: told of each request that has ended.
        """
        self.records: list[Record] = []
        self.open: dict[Record, Answer] = {}  # sent, and not ended
        self.num_due = 0
        self.start = 0.0  # by time.perf_counter(), once it runs
        self.client_seconds = 0.0  # processor time of this process while the load ran
        self._client = client
        self._form = form
        self._plan = plan
        self._num_users = num_users
        self._duration = duration
        self._start_at = start_at
        self._on_record = on_record
        self._places = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Send nothing more and give up what is open."""
        self._stopped.set()

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start

    async def run(self) -> list[Record]:
        """Send everything and wait for the last answer; the records in the order of their ends.

        Raises:
            TooLate: the time to start at is over.
        """
        ahead = [] if self._num_users else self._bodies_ahead()
        with _few_pauses():
            processor_start = time.process_time()
            self.start = time.perf_counter() + self._head_start()
            work = asyncio.create_task(self._open_loop(ahead) if self._num_users is None else self._closed_loop())
            stopping = asyncio.create_task(self._stopped.wait())
            try:
                await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
            finally:
                work.cancel()
                stopping.cancel()
                (result, _) = await asyncio.gather(work, stopping, return_exceptions=True)
            if isinstance(result, Exception):
                raise result
            self.client_seconds = time.process_time() - processor_start
        return self.records

    def _head_start(self) -> float:
        if self._start_at is None:
            return _HEAD_START
        left = self._start_at - time.time()
        if left < 0:
            raise TooLate(
                f"The load was ready {-left:.1f} s after the time it was to start at: give a later --start-at."
            )
        return left

    def _bodies_ahead(self) -> list[bytes]:
        bodies: list[bytes] = []
        size = 0
        for session in self._plan.sessions:
            if size > _AHEAD_BYTES:
                break
            first = session.requests[0]
            bodies.append(self._form.body(first.make_prompt(), first.max_tokens))
            size += len(bodies[-1])
        return bodies

    async def _open_loop(self, ahead: list[bytes]) -> None:
        async with asyncio.TaskGroup() as group:

            def begin(due: tuple[int, PlannedSession, bytes]) -> None:
                number, session, body = due
                group.create_task(self._hold(number, session, session.start, body))

            await Metronome(self.start).run(self._series(ahead), begin)

    def _series(self, ahead: list[bytes]) -> Iterator[tuple[float, tuple[int, PlannedSession, bytes]]]:
        for number, session in enumerate(self._plan.sessions):
            first = session.requests[0]
            is_made = number < len(ahead)
            body = ahead[number] if is_made else self._form.body(first.make_prompt(), first.max_tokens)
            yield session.start, (number, session, body)

    async def _closed_loop(self) -> None:
        assert self._num_users is not None
        await asyncio.sleep(self.start - time.perf_counter())
        waiting = iter(enumerate(self._plan.sessions))

        async def one_user() -> None:
            due = 0.0
            for number, session in waiting:
                due += session.requests[0].think_time if due else 0.0
                if not self._has_time(due):
                    return
                due = await self._hold(number, session, due)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._num_users):
                group.create_task(one_user())

    def _has_time(self, due: float) -> bool:
        return self._duration is None or due < self._duration

    async def _hold(self, number: int, session: PlannedSession, due: float, body: bytes | None = None) -> float:
        """Send a session's requests one after another; when the last had ended.

        In a closed loop one that is due after the duration is not sent, and is no failure. After a failure nobody sends
        the rest: those requests are counted as unsent.
        """
        talk = Talk(self._form, session)
        for turn, request in enumerate(session.requests):
            due += request.think_time if turn else 0.0
            if turn and self._num_users is not None and not self._has_time(due):
                break
            if turn or body is None:
                body = talk.body(turn)
            while (left := due - self.now) > 0:  # event loops that round to milliseconds may wake up early
                await asyncio.sleep(left)
            record = Record(number, turn, due, request.max_tokens)
            answer = await self._ask(record, body, keeps_text=session.is_conversation)
            talk.hear(answer.text)
            due = self.now if record.ended is None else record.ended
            if not record.is_answered:
                self._count_unsent(number, session.requests, turn + 1, due)
                break
        return due

    async def _ask(self, record: Record, body: bytes, *, keeps_text: bool) -> Answer:
        self.num_due += 1
        if self._places is None:
            return await self._send(record, body, keeps_text=keeps_text)
        async with self._places:
            return await self._send(record, body, keeps_text=keeps_text)

    async def _send(self, record: Record, body: bytes, *, keeps_text: bool) -> Answer:
        answer = Answer(keeps_text=keeps_text)
        self.open[record] = answer
        record.sent = self.now
        try:
            answer.end(await self._client.post(self._form.path, body, answer.take))
        except ExchangeFailed as failure:
            record.error_kind, record.error_message = failure.kind, failure.message
        except asyncio.CancelledError:
            record.error_kind, record.error_message = _ABANDONED, "the load was stopped before the answer was whole"
            raise
        finally:
            del self.open[record]
            self._fill(record, answer)
            self._keep(record)
        return answer

    def _fill(self, record: Record, answer: Answer) -> None:
        record.ended = self.now
        record.piece_times = array("d", [when - self.start for when in answer.piece_times])
        record.num_prompt_tokens = answer.num_prompt_tokens
        record.num_counted_tokens = answer.num_output_tokens
        record.num_cached_tokens = answer.num_cached_tokens
        record.finish_reason = answer.finish_reason

    def _count_unsent(self, number: int, requests: tuple[PlannedRequest, ...], first: int, now: float) -> None:
        message = "the request before it in its session had failed"
        for turn in range(first, len(requests)):
            self._keep(Record(number, turn, now, requests[turn].max_tokens, error_kind="unsent", error_message=message))

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        self._on_record(record)


@contextmanager
def _few_pauses() -> Iterator[None]:
    """Let nothing in this process hold up the clock for long: no collections, and short turns between threads."""
    interval = sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    gc.disable()
    sys.setswitchinterval(0.0005)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.enable()
        gc.unfreeze()
