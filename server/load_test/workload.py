"""What is asked and when: a source of sessions and a way of arriving, read from the options, make a plan.

Everything is decided here, before the load begins. Reads the files that are named; knows no server.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, takewhile
from typing import Literal

from server.load_test.arrivals import Process, arrivals, within
from server.load_test.lengths import Lengths, read_lengths
from server.load_test.objective import Objective
from server.load_test.options import DEFAULT_REQUESTS, DEFAULT_SEARCH_SECONDS, DEFAULT_USERS
from server.load_test.plan import Plan, PlannedSession
from server.load_test.prompt_files import file_sessions, read_prompts
from server.load_test.prompt_maker import PromptMaker
from server.load_test.synthetic import Synthetic, synthetic_sessions
from server.load_test.trace_prompts import TraceOptions, load_trace, trace_sessions
from server.settings_error import SettingsError

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


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything that is asked of the server, but for the seed."""

    source: Source
    arrivals: Arrivals | None  # None: a closed loop
    amount: Amount
    num_users: int | None  # None: an open loop
    max_concurrency: int | None
    start_at: float | None = None  # by time.time(); None: as soon as it can

    def plan(self, maker: PromptMaker, rate: float | None = None) -> Plan:
        """The plan of one load; `rate` instead of the one that was given.

        Raises:
            BadPlan: nothing is due.
        """
        if self.arrivals is None:
            return plan_closed_loop(self.source, self.amount, maker)
        how = self.arrivals
        if rate is not None:
            how = Arrivals(how.process, rate, how.burstiness)
        return plan_open_loop(self.source, how, self.amount, maker)

    def describe(self) -> str:
        """How requests arrive, for a person."""
        if self.arrivals is None:
            return f"closed loop of {self.num_users} users"
        how = self.arrivals
        limit = "" if self.max_concurrency is None else f", at most {self.max_concurrency} open"
        shape = f" (shape {how.burstiness:g})" if how.process == "gamma" else ""
        rate = f"{how.rate:g} sessions/s" if how.rate is not None else f"{how.speed:g} times as fast as recorded"
        return f"open loop, {how.process}{shape}, {rate}{limit}"


def workload_of(options: argparse.Namespace, seed: int, max_model_len: int | None) -> Workload:
    """Read what is to be sent.

    Args:
        options: of the command line.
        seed: for where a trace's rounded times are spread, and what of it is kept.
        max_model_len: longer requests of a trace are left out; None: it is not known.

    Raises:
        SettingsError: options that do not go together.
        UnreadableTrace, BadTraceOptions, BadPromptFile: what was named cannot be used.
    """
    source = _source_of(options, seed, max_model_len)
    arrivals = _arrivals_of(options, source)
    num_users = None
    if arrivals is None:
        num_users = options.concurrency or DEFAULT_USERS
        for name, flag in (("max_concurrency", "--max-concurrency"), ("speed", "--speed")):
            if getattr(options, name) is not None:
                raise SettingsError(f"{flag} is for an open loop: give --rate, or a trace or file with times.")
    return Workload(source, arrivals, _amount_of(options, source), num_users, options.max_concurrency, options.start_at)


def objective_of(options: argparse.Namespace) -> Objective:
    """What was promised; nothing may have been."""
    return Objective(options.slo_ttft, options.slo_tpot, options.slo_itl, options.slo_e2e)


def _source_of(options: argparse.Namespace, seed: int, max_model_len: int | None) -> Source:
    if options.trace is not None:
        return _trace_source(options, seed, max_model_len)
    output_tokens = options.output_tokens or read_lengths("64")
    if options.prompts is not None:
        return _file_source(options, output_tokens)
    spec = Synthetic(
        input_tokens=options.input_tokens or read_lengths("256"),
        output_tokens=output_tokens,
        num_turns=options.turns or read_lengths("1"),
        think_time=options.think_time or 0.0,
        num_prefix_tokens=options.prefix_tokens or 0,
        num_prefixes=options.num_prefixes or 1,
    )
    parts = [f"made-up prompts of {spec.input_tokens.text} tokens", f"answers of {spec.output_tokens.text}"]
    if spec.num_prefix_tokens:
        parts.append(f"after {spec.num_prefixes} shared prefixes of {spec.num_prefix_tokens}")
    if options.turns is not None:
        parts.append(f"{spec.num_turns.text} turns")
    return Source(", ".join(parts), partial(synthetic_sessions, spec))


def _trace_source(options: argparse.Namespace, seed: int, max_model_len: int | None) -> Source:
    wanted = TraceOptions(
        options.trace,
        first=options.first,
        until=options.until,
        sample=options.sample,
        tokens_per_run=options.tokens_per_run,
        token_scale=options.token_scale,
        output_scale=options.output_scale,
        think_scale=1.0 if options.think_scale is None else options.think_scale,
        session_spread=options.session_spread or 3600.0,
    )
    trace = load_trace(wanted, seed, max_model_len)
    limit = f"of the whole trace's prompt tokens a cache without limit would find {trace.hit_rate_limit():.1%}"
    return Source(
        f"the trace {trace.name}",
        partial(trace_sessions, trace, wanted.think_scale),
        len(trace.sessions),
        has_starts=True,
        notes=(*trace.notes, limit),
    )


def _file_source(options: argparse.Namespace, output_tokens: Lengths) -> Source:
    rows = read_prompts(options.prompts, is_chat=options.endpoint == "chat")

    def sessions(maker: PromptMaker) -> Iterator[PlannedSession]:
        return file_sessions(rows, output_tokens, options.think_time or 0.0, maker.seed)

    has_starts = all(row.at is not None for row in rows)
    return Source(f"the prompts of {options.prompts.name}", sessions, len(rows), has_starts=has_starts)


def _arrivals_of(options: argparse.Namespace, source: Source) -> Arrivals | None:
    is_open = options.rate is not None or options.find_rate or (source.has_starts and options.concurrency is None)
    if not is_open:
        if options.arrivals == "recorded":
            raise SettingsError(
                f"--arrivals recorded needs a trace, or a file whose rows all have `at`: {source.name}."
            )
        return None
    process: ArrivalProcess = options.arrivals or ("recorded" if source.has_starts else "poisson")
    if options.speed is not None and process != "recorded":
        raise SettingsError("--speed is for arrivals that were recorded: use --rate.")
    # Where a rate is searched, each trial brings its own.
    rate = options.rate or (1.0 if options.find_rate else None)
    return Arrivals(process, rate, options.burstiness or 1.0, options.speed or 1.0)


def _amount_of(options: argparse.Namespace, source: Source) -> Amount:
    num_sessions, duration = options.num_requests, options.duration
    if num_sessions is None and duration is None:
        if options.find_rate:
            duration = DEFAULT_SEARCH_SECONDS
        elif source.num_sessions is None:
            num_sessions = DEFAULT_REQUESTS
    return Amount(num_sessions, duration)
