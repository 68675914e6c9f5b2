"""Puts together what is asked and when it is asked: a source of sessions and a way of arriving make a plan.

Everything is decided here, before the load begins. Knows no server.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Literal

from server.load_test.arrivals import Process, arrivals, within
from server.load_test.plan import Plan, PlannedSession
from server.load_test.prompt_maker import PromptMaker

ArrivalProcess = Process | Literal["recorded"]


class BadPlan(ValueError):
    """What is asked and when do not go together; the message is for the person who asked for both."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where sessions come from."""

    name: str
    sessions: Callable[[PromptMaker], Iterator[PlannedSession]]
    num_sessions: int | None = None  # None: without end
    has_starts: bool = False  # the sessions know when they start
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How the sessions of an open loop arrive."""

    process: ArrivalProcess
    rate: float | None = None  # sessions per second; None: as fast as recorded
    burstiness: float = 1.0
    speed: float = 1.0  # so many times as fast as recorded


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is asked. At least one is given unless the source has an end."""

    num_sessions: int | None = None
    duration: float | None = None  # seconds in which sessions may start


def plan_closed_loop(source: Source, amount: Amount, maker: PromptMaker) -> Plan:
    """The sessions that users take one after another."""
    num_sessions = _num_sessions(source, amount)
    sessions = source.sessions(maker)
    if num_sessions is None:
        return Plan(source.name, sessions, None, source.notes)
    return _planned(source, tuple(islice(sessions, num_sessions)), num_sessions)


def plan_open_loop(source: Source, how: Arrivals, amount: Amount, maker: PromptMaker) -> Plan:
    """The sessions, each with the time at which it starts.

    Raises:
        BadPlan: nothing arrives in the time, or the source does not know when its sessions start.
    """
    if how.process == "recorded":
        sessions = _recorded(source, how, maker)
        if amount.duration is not None:
            seconds = amount.duration
            sessions = tuple(takewhile(lambda session: session.start < seconds, sessions))
        sessions = sessions[: amount.num_sessions]
    else:
        assert how.rate is not None, "arrivals that are drawn have a rate"
        chance = random.Random(f"{maker.seed} arrivals")  # noqa: S311  # no secrets here
        times = arrivals(how.process, how.rate, chance, how.burstiness)
        if amount.duration is not None:
            times = within(times, amount.duration)
        starts = islice(times, _num_sessions(source, amount))
        sessions = tuple(
            replace(session, start=start) for start, session in zip(starts, source.sessions(maker), strict=False)
        )
    if not sessions:
        raise BadPlan("Nothing is due in the time of the load: raise --duration or the rate.")
    return _planned(source, sessions, amount.num_sessions)


def _recorded(source: Source, how: Arrivals, maker: PromptMaker) -> tuple[PlannedSession, ...]:
    if not source.has_starts or source.num_sessions is None:
        raise BadPlan(f"{source.name} does not say when requests arrive: give --rate or --concurrency.")
    sessions = sorted(islice(source.sessions(maker), source.num_sessions), key=lambda session: session.start)
    speed = how.speed
    span = sessions[-1].start - sessions[0].start
    if how.rate is not None:
        if span <= 0:
            raise BadPlan(f"{source.name} has no two arrivals at different times, so no rate that could be changed.")
        speed = how.rate / ((len(sessions) - 1) / span)
    first = sessions[0].start
    return tuple(replace(session, start=(session.start - first) / speed) for session in sessions)


def _num_sessions(source: Source, amount: Amount) -> int | None:
    """How many to take of the source; without any wish, all that it has once. None: as many as the time allows."""
    if amount.num_sessions is None and amount.duration is None:
        return source.num_sessions
    return amount.num_sessions


def _planned(source: Source, sessions: tuple[PlannedSession, ...], num_wanted: int | None) -> Plan:
    notes = source.notes
    if source.num_sessions is not None and len(sessions) > source.num_sessions:
        notes = (*notes, f"{source.num_sessions} sessions are asked again and again: caches find later ones")
    if num_wanted is not None and len(sessions) < num_wanted:
        notes = (*notes, f"{len(sessions)} sessions were due, not the {num_wanted} that were asked for")
    return Plan(source.name, sessions, sum(len(session.requests) for session in sessions), notes)
