"""What a call of a client is, and how calls are run and reported. Knows no client and no server."""

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER_QUESTION = [{"role": "user", "content": "What is the weather in Oslo? Use celsius."}]


@dataclass(frozen=True, slots=True)
class Target:
    """The server that the clients call."""

    url: str  # without /v1
    model: str


@dataclass(frozen=True, slots=True)
class Call:
    """One use of a client, which asserts what it gets and may tell it in a few words."""

    name: str
    run: Callable[[Target], str | None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call went."""

    client: str
    call: str
    passed: bool
    seconds: float
    note: str
    trace: str = ""


def run_calls(client: str, calls: Iterable[Call], target: Target) -> Iterable[Outcome]:
    """Run them one after the other; what one raises does not keep the others from running."""
    for call in calls:
        started = time.perf_counter()
        try:
            note = call.run(target) or ""
            yield Outcome(client, call.name, True, time.perf_counter() - started, note)
        except Exception as error:
            note = " ".join(f"{type(error).__name__}: {error}".split())
            yield Outcome(client, call.name, False, time.perf_counter() - started, note, traceback.format_exc())


def line_of(outcome: Outcome) -> str:
    """A row of the table."""
    result = "ok" if outcome.passed else "FAILED"
    return f"{outcome.client:<26} {outcome.call:<46} {result:<7}{outcome.seconds:7.2f} s  {outcome.note[:150]}".rstrip()
