"""Reads traces that were published: Mooncake, Azure, recorded coding assistants; tells the form by the first line.

Formats: github.com/kvcache-ai/Mooncake, Azure/AzurePublicDataset (2023), callanjfox/kv-cache-tester (block ids as
[first id, count] runs). Knows no scheduler.
"""

import csv
import json
import random
from array import array
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from scheduler.simulate.servegen import read_servegen
from scheduler.simulate.traces import Session, Trace, Turn, UnreadableTrace

MOONCAKE_TOKENS_PER_RUN = 512
CODING_ASSISTANT_TOKENS_PER_RUN = 64


def read_trace(path: Path, *, seed: int = 0, session_spread: float = 3600.0, rate: float = 1.0) -> Trace:
    """Read a trace of any known form.

    Args:
        path: a Mooncake or coding-assistant .jsonl, an Azure .csv, or a folder with ServeGen's client_rates.csv and
            client_lengths.jsonl, after a "#" which of its models and how many seconds to draw: "servegen#m-small:600".
        seed: for whatever is drawn: where in its clump a request arrives, when a conversation starts.
        session_spread: seconds over which the starts of recorded conversations are spread; they know none.
        rate: requests arrive so many times as fast.

    Raises:
        UnreadableTrace: naming the file and line.
    """
    folder, _, wanted = str(path).partition("#")
    if Path(folder).is_dir():
        return read_servegen(Path(folder), wanted, random.Random(seed), rate)  # noqa: S311  # no secrets here
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableTrace(f"The trace {path} cannot be read: {error}.") from None
    if not lines:
        raise UnreadableTrace(f"The trace {path} is empty.")
    chance = random.Random(seed)  # noqa: S311  # no secrets here
    if lines[0].startswith("TIMESTAMP"):
        return _read_azure(path.stem, lines).faster(rate)
    rows = [_row(path, number, line) for number, line in enumerate(lines, start=1) if line]
    try:
        if "hash_ids" in rows[0]:
            return _read_mooncake(path.stem, rows, chance).faster(rate)
        if "hash_runs" in rows[0]:
            return _read_coding_assistant(path.stem, rows, session_spread, chance).faster(rate)
    except (KeyError, TypeError) as error:
        raise UnreadableTrace(f"A line of the trace {path} lacks a field or has a wrong one: {error}.") from None
    raise UnreadableTrace(f"The first line of {path} has neither hash_ids nor hash_runs nor a header with TIMESTAMP.")


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UnreadableTrace(f"Line {number} of {path} is not JSON: {error}.") from None
    if not isinstance(row, dict):
        raise UnreadableTrace(f"Line {number} of {path} is not a JSON object.")
    return row


def _read_azure(name: str, lines: Sequence[str]) -> Trace:
    """TIMESTAMP, ContextTokens, GeneratedTokens: nothing is known of shared prefixes, so nothing is shared."""
    sessions = []
    start = None
    for number, row in enumerate(csv.DictReader(lines), start=2):
        try:
            # Seven decimals of a second: one more than datetime reads.
            arrival = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            turn = Turn(max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])))
        except (KeyError, TypeError, ValueError) as error:
            raise UnreadableTrace(f"Line {number} of the trace {name} cannot be read: {error}.") from None
        start = arrival if start is None else start
        sessions.append(Session(arrival - start, (turn,)))
    return Trace(name, _in_order(sessions))


def _read_mooncake(name: str, rows: Sequence[dict[str, Any]], chance: random.Random) -> Trace:
    """One request a row, `timestamp` in ms, one of `hash_ids` for each 512 prompt tokens, begun ones included."""
    runs = _DenseIds()
    arrivals, spread = _spread_clumps([row["timestamp"] / 1000 for row in rows], chance)
    sessions = [
        Session(arrival, (Turn(row["input_length"], max(1, row["output_length"]), runs.of(row["hash_ids"])),))
        for arrival, row in zip(arrivals, rows, strict=True)
    ]
    notes = (f"arrivals that share a time are spread over the {spread:.1f} s that follow",) if spread else ()
    return Trace(name, _in_order(sessions), MOONCAKE_TOKENS_PER_RUN, notes)


def _spread_clumps(times: Sequence[float], chance: random.Random) -> tuple[list[float], float]:
    """Times that were rounded down before they were published, and the seconds over which each is now drawn.

    Times are taken for rounded where more than two requests share one on average.
    """
    distinct = sorted(set(times))
    if len(times) <= 2 * len(distinct) or len(distinct) < 2:
        return list(times), 0.0
    width = median(later - earlier for earlier, later in pairwise(distinct))
    return [
        time + offset
        for time, clump in groupby(times)
        for offset in sorted(chance.uniform(0, width) for _ in clump)  # in the order of the file
    ], width


def _read_coding_assistant(
    name: str, rows: Sequence[dict[str, Any]], session_spread: float, chance: random.Random
) -> Trace:
    """Recorded conversations, each a closed loop. `hash_runs` are [first id, count] of full blocks of 64 tokens.

    An id means the same in one conversation only. Where the think time is unknown it is what the recorded times of
    the steps leave when the answer's own time is taken off.
    """
    sessions = []
    runs = _DenseIds()
    for conversation, steps in groupby(rows, key=lambda row: row["conversation"]):
        turns = []
        answered = 0.0
        for step in steps:
            ids = [(conversation, run) for first, count in step["hash_runs"] for run in range(first, first + count)]
            think_time = step.get("think_time", max(0.0, step["t"] - answered))
            turns.append(Turn(step["input_length"], max(1, step["output_length"]), runs.of(ids), think_time))
            answered = step["t"] + step.get("api_time", 0.0)
        sessions.append(Session(chance.uniform(0, session_spread), tuple(turns)))
    notes = (f"the conversations' starts are spread over {session_spread:g} s",)
    return Trace(name, _in_order(sessions), CODING_ASSISTANT_TOKENS_PER_RUN, notes)


class _DenseIds:
    """Numbers 0, 1, 2 ... for ids of any kind: they become token ids, which have 31 bits."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def of(self, ids: Iterable[object]) -> "array[int]":
        numbers = self._numbers
        return array("i", [numbers.setdefault(each, len(numbers)) for each in ids])


def _in_order(sessions: list[Session]) -> tuple[Session, ...]:
    return tuple(sorted(sessions, key=lambda session: session.start))
