"""What the options mean: which sessions, arriving how, and how many of them. Reads the files that are named."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from server.load_test.lengths import Lengths, read_lengths
from server.load_test.objective import Objective
from server.load_test.options import DEFAULT_REQUESTS, DEFAULT_SEARCH_SECONDS, DEFAULT_USERS
from server.load_test.plan import Plan, PlannedSession
from server.load_test.planning import Amount, ArrivalProcess, Arrivals, Source, plan_closed_loop, plan_open_loop
from server.load_test.prompt_files import file_sessions, read_prompts
from server.load_test.prompt_maker import PromptMaker
from server.load_test.synthetic import Synthetic, synthetic_sessions
from server.load_test.trace_prompts import TraceOptions, load_trace, trace_sessions
from server.settings_error import SettingsError


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
