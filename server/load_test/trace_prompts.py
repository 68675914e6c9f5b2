"""Sessions of a published trace: its times, its lengths and what its prompts share, with made-up text.

Reading and shrinking traces is the simulator's, so that a trace means the same in a simulation and in a load test.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from scheduler.simulate.trace_files import read_trace
from scheduler.simulate.traces import Session, Trace, Turn
from server.load_test.plan import PlannedRequest, PlannedSession
from server.load_test.prompt_maker import PromptMaker


class BadTraceOptions(ValueError):
    """What was asked of a trace cannot be had; the message is for the person who asked."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Which part of which trace, and how its lengths are changed."""

    path: Path  # as scheduler.simulate takes it
    first: int | None = None  # sessions
    until: float | None = None  # seconds of the trace
    sample: float | None = None  # about this share, prefixes kept whole
    tokens_per_run: int | None = None
    token_scale: float | None = None  # of prompts, and of answers where there is no output_scale
    output_scale: float | None = None
    think_scale: float = 1.0  # of the recorded think times
    session_spread: float = 3600.0  # seconds


def load_trace(options: TraceOptions, seed: int, max_model_len: int | None) -> Trace:
    """Read, cut and scale. Requests that exceed `max_model_len` are left out, and a note says how many.

    Raises:
        UnreadableTrace: there is none.
        BadTraceOptions: nothing is left of it, or it has no runs to be scaled.
    """
    trace = read_trace(options.path, seed=seed, session_spread=options.session_spread)
    if options.until is not None:
        trace = trace.until(options.until)
    if options.first is not None:
        trace = trace.first(options.first)
    if options.sample is not None:
        trace = trace.sampled(options.sample, seed)
    if not trace.sessions:
        raise BadTraceOptions("Nothing of the trace is left: use larger values for --until, --first or --sample.")
    trace = _scaled(trace, options)
    if max_model_len is not None:
        trace = trace.within(max_model_len, max_model_len)
        if not trace.sessions:
            raise BadTraceOptions(
                f"Every request of the trace exceeds the {max_model_len} tokens that the server takes: "
                "shrink it with --token-scale."
            )
    return trace


def trace_sessions(trace: Trace, think_scale: float, maker: PromptMaker) -> Iterator[PlannedSession]:
    """The sessions, with the starts that the trace has."""
    for number, session in enumerate(trace.sessions):
        requests = tuple(
            _request(
                turn, trace.tokens_per_run, f"{number}.{place}", maker, turn.think_time * think_scale if place else 0.0
            )
            for place, turn in enumerate(session.turns)
        )
        yield PlannedSession(session.start, requests)


def _request(turn: Turn, tokens_per_run: int, name: str, maker: PromptMaker, think_time: float) -> PlannedRequest:
    make = partial(maker.of_runs, turn.run_ids, tokens_per_run, turn.num_prompt_tokens, name)
    return PlannedRequest(make, turn.num_output_tokens, think_time)


def _scaled(trace: Trace, options: TraceOptions) -> Trace:
    has_runs = any(turn.run_ids for turn in trace.turns())
    scale = 1.0 if options.token_scale is None else options.token_scale
    output_scale = scale if options.output_scale is None else options.output_scale
    if options.tokens_per_run is not None and not has_runs:
        raise BadTraceOptions(
            "--tokens-per-run is for traces that know of shared prefixes, which this one does not: use --token-scale."
        )
    if has_runs:
        # Whole tokens for each run, so that runs stay equal and prompts go on sharing what they shared.
        tokens_per_run = options.tokens_per_run or max(1, round(trace.tokens_per_run * scale))
        return trace.scaled(tokens_per_run, output_scale)

    def shorter(turn: Turn) -> Turn:
        return replace(
            turn,
            num_prompt_tokens=max(1, round(turn.num_prompt_tokens * scale)),
            num_output_tokens=max(1, round(turn.num_output_tokens * output_scale)),
        )

    sessions: tuple[Session, ...] = tuple(
        replace(session, turns=tuple(map(shorter, session.turns))) for session in trace.sessions
    )
    return replace(trace, sessions=sessions)
