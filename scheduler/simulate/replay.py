"""Runs a trace through a deployment, event by event: arrivals, the ends of steps, and the turns that follow answers.

Owns the clock. What each event means is the replica's.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from scheduler.admission import RequestRefused
from scheduler.request import Request
from scheduler.request_report import RequestReport
from scheduler.sampling_params import SamplingParams
from scheduler.simulate.deployment import Deployment
from scheduler.simulate.measurements import Measurements
from scheduler.simulate.prompts import prompt_token_ids
from scheduler.simulate.replica import Replica
from scheduler.simulate.routers import build_router
from scheduler.simulate.traces import Session, Trace
from scheduler.stats import SchedulerStats

# At the same time results come before arrivals: with steps that take no time, each request is answered before the next.
_RESULT, _ARRIVAL = 0, 1


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came out, and whether the replay went on to its end."""

    measurements: Measurements
    stats: tuple[SchedulerStats, ...]  # of each replica
    is_complete: bool


class Replay:
    """One trace through one deployment, once."""

    def __init__(self, trace: Trace, deployment: Deployment) -> None:
        """Prepare idle replicas."""
        self._trace = trace
        self._deployment = deployment
        self._measurements = Measurements()
        self._replicas = [Replica(deployment, self._measurements) for _ in range(deployment.num_replicas)]
        self._router = build_router(deployment.router, deployment.num_replicas)
        self._events: list[tuple[float, int, int, Session | Replica, int]] = []  # with a number that breaks ties
        self._num_events = 0
        self._num_submitted = 0
        self._unanswered: dict[str, tuple[Session, int, Replica]] = {}  # by request_id: session, turn, where it is

    def run(
        self,
        *,
        advance: Callable[[int], None] = lambda _: None,
        gives_up: Callable[[Measurements], bool] = lambda _: False,
    ) -> Replayed:
        """Replay to the end.

        Args:
            advance: told how many requests have ended since the last call.
            gives_up: asked after each end of a request whether the rest is not worth knowing.
        """
        sessions = self._trace.sessions
        num_started = 0
        num_ended = 0
        while self._events or num_started < len(sessions):
            # A trace's sessions are in order, so that the heap holds no more than what is going on.
            if num_started < len(sessions) and (
                not self._events or (sessions[num_started].start, _ARRIVAL) < self._events[0][:2]
            ):
                session = sessions[num_started]
                num_started += 1
                ended = self._arrive(session, 0, session.start)
            else:
                time, _, _, what, turn = heapq.heappop(self._events)
                ended = self._wake(what, time) if isinstance(what, Replica) else self._arrive(what, turn, time)
            if ended:
                advance(ended)
                num_ended += ended
                if gives_up(self._measurements):
                    return self._replayed(is_complete=False)
        assert num_ended == self._trace.num_requests and not self._unanswered, "a request has not ended"
        return self._replayed(is_complete=True)

    def check_integrity(self) -> None:
        """Prove that every replica's books agree."""
        for replica in self._replicas:
            replica.check_integrity()

    def _arrive(self, session: Session, number: int, now: float) -> int:
        """Send a turn; how many requests have ended by that."""
        turn = session.turns[number]
        replica = self._replicas[self._router.choose(turn, [replica.load for replica in self._replicas])]
        serial = self._num_submitted
        self._num_submitted += 1
        deployment = self._deployment
        token_ids = prompt_token_ids(turn, self._trace.tokens_per_run, serial)
        request = Request(
            str(serial),
            cast("tuple[int, ...]", token_ids),
            SamplingParams(max_tokens=turn.num_output_tokens, ignore_eos=True),
            arrival_time=now,
            queue_deadline=None if deployment.queue_timeout is None else now + deployment.queue_timeout,
            deadline=None if deployment.timeout is None else now + deployment.timeout,
        )
        was_idle = replica.wake_time is None
        self._unanswered[request.request_id] = (session, number, replica)
        try:
            ended = replica.submit(request, now)
        except RequestRefused:
            del self._unanswered[request.request_id]
            self._measurements.num_refused += 1
            return 1 + self._give_up_session(session, number)
        if was_idle:
            self._expect_result(replica)
        return self._take_ended(ended, now)

    def _wake(self, replica: Replica, now: float) -> int:
        ended = replica.wake(now)
        self._expect_result(replica)
        return self._take_ended(ended, now)

    def _take_ended(self, ended: Sequence[RequestReport], now: float) -> int:
        """Let the next turns follow those that were answered; how many requests have ended, unsent ones included."""
        num_ended = len(ended)
        for report in ended:
            session, number, _ = self._unanswered.pop(report.request_id)
            if report.drop_cause is not None:
                num_ended += self._give_up_session(session, number)
            elif number + 1 < len(session.turns):
                self._push(now + session.turns[number + 1].think_time, _ARRIVAL, session, number + 1)
        return num_ended

    def _give_up_session(self, session: Session, number: int) -> int:
        """Nobody sends the turns after one that was not answered; how many they are."""
        num_unsent = len(session.turns) - number - 1
        self._measurements.num_unsent += num_unsent
        return num_unsent

    def _expect_result(self, replica: Replica) -> None:
        if replica.wake_time is not None:
            self._push(replica.wake_time, _RESULT, replica, 0)

    def _push(self, time: float, kind: int, what: Session | Replica, turn: int) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, kind, self._num_events, what, turn))

    def _replayed(self, *, is_complete: bool) -> Replayed:
        return Replayed(self._measurements, tuple(replica.stats for replica in self._replicas), is_complete)
