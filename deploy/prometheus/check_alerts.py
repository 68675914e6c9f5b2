"""Sees alerts fire and resolve for real: `check_alerts.py` stops the engine of a server under load, then kills it.

The real server and the real Prometheus with deploy/prometheus/rules.yml. Prints a table; ends with 1 if an alert does
not do what it should, with 2 where Prometheus is missing. Takes about three minutes.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the repository's
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.local_server import ServerDidNotStart, local_server
from deploy.local_prometheus import Prometheus, PrometheusMissing, local_prometheus

MODEL = "smollm2"
STALLED, RESTARTED = "OctavoEngineStalled", "OctavoEngineRestarted"
_NUM_CALLERS = 4
_BODY = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 256, "ignore_eos": True}
_ENGINE_MODULE = b"server.engine_process"
_LOOK_SECONDS = 1.0
_WARM_UP_SECONDS = 10.0
# The rule looks back for a minute, at every 15 s; the server kills an engine that has said nothing for two.
_STALL_PATIENCE = 110.0
_PATIENCE = 60.0
_REQUEST_SECONDS = 600.0  # an engine that stands still is to be waited for


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one alert. Seconds from the event before; None = it did not happen in time."""

    alert: str
    cause: str
    fired_after: float | None
    resolved_by: str
    resolved_after: float | None
    others: str  # that fired at the same time and should not have

    @property
    def is_right(self) -> bool:
        """It fired, alone, and resolved where that was waited for."""
        return (
            self.fired_after is not None
            and not self.others
            and (not self.resolved_by or self.resolved_after is not None)
        )


def descendants(of: int) -> Iterator[int]:
    """The processes that a process has started, and those that they have."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    for process in parents:
        ancestor = process
        while ancestor in parents and ancestor != of:
            ancestor = parents[ancestor]
        if ancestor == of and process != of:
            yield process


def engine_process() -> int:
    """The engine of the server that this process has started. Raises LookupError."""
    for process in descendants(os.getpid()):
        with suppress(OSError):
            if _ENGINE_MODULE in Path(f"/proc/{process}/cmdline").read_bytes():
                return process
    raise LookupError("the server has no engine process")


async def keep_running(url: str) -> None:
    """Callers that always have a request open, whatever becomes of it."""

    async def call() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=_REQUEST_SECONDS, trust_env=False) as client:
            while True:
                with suppress(httpx.HTTPError):
                    answer = await client.post("/v1/completions", json=_BODY)
                    if answer.is_success:
                        continue
                await asyncio.sleep(1)

    async with asyncio.TaskGroup() as callers:
        for _ in range(_NUM_CALLERS):
            callers.create_task(call())


async def firing(prometheus: Prometheus) -> set[str]:
    """The names of the alerts that fire now."""
    alerts = await asyncio.to_thread(prometheus.alerts)
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


async def seconds_until(condition: Callable[[], Awaitable[bool]], patience: float) -> float | None:
    """How long it took to become true; None if it did not."""
    begin = time.monotonic()
    while not await condition():
        if time.monotonic() - begin > patience:
            return None
        await asyncio.sleep(_LOOK_SECONDS)
    return time.monotonic() - begin


async def stopped(prometheus: Prometheus) -> Outcome:
    """Stop the engine until the alert fires, let it go on, and wait until the alert is gone."""

    async def fires() -> bool:
        return STALLED in await firing(prometheus)

    async def is_quiet() -> bool:
        return not await fires()

    engine = engine_process()
    os.kill(engine, signal.SIGSTOP)
    try:
        fired_after = await seconds_until(fires, _STALL_PATIENCE)
        others = await firing(prometheus) - {STALLED}
    finally:
        os.kill(engine, signal.SIGCONT)
    resolved_after = await seconds_until(is_quiet, _PATIENCE)
    return Outcome(STALLED, "SIGSTOP", fired_after, "SIGCONT", resolved_after, ", ".join(sorted(others)))


async def killed(prometheus: Prometheus) -> Outcome:
    """Kill the engine, which the server starts again; that alert stays for a quarter of an hour."""

    async def fires() -> bool:
        return RESTARTED in await firing(prometheus)

    os.kill(engine_process(), signal.SIGKILL)
    fired_after = await seconds_until(fires, _PATIENCE)
    others = await firing(prometheus) - {RESTARTED}
    return Outcome(RESTARTED, "SIGKILL", fired_after, "", None, ", ".join(sorted(others)))


async def checked(url: str, prometheus: Prometheus) -> list[Outcome]:
    """Both, one after the other; before them, nothing may fire under load. Raises RuntimeError."""
    load = asyncio.create_task(keep_running(url))
    try:
        await asyncio.sleep(_WARM_UP_SECONDS)
        if too_early := await firing(prometheus):
            raise RuntimeError(f"alerts fire while nothing is wrong: {', '.join(sorted(too_early))}")
        return [await stopped(prometheus), await killed(prometheus)]
    finally:
        load.cancel()
        await asyncio.wait({load})


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """A line for each alert."""
    table = Table("Alert", "Engine gets", "Fires after", "Engine gets", "Resolves after", "Result")
    for each in outcomes:
        times = ["never" if s is None else f"{s:.0f} s" for s in (each.fired_after, each.resolved_after)]
        result = "ok" if each.is_right else f"wrong; fires too: {each.others or 'nothing'}"
        table.add_row(each.alert, each.cause, times[0], each.resolved_by, times[1] if each.resolved_by else "", result)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    try:
        with local_server(["--model", MODEL]) as url, local_prometheus(url.removeprefix("http://")) as prometheus:
            outcomes = asyncio.run(checked(url, prometheus))
    except PrometheusMissing as missing:
        print(f"Not checked: {missing}.", file=sys.stderr)
        return 2
    except (ServerDidNotStart, RuntimeError) as failure:
        print(failure, file=sys.stderr)
        return 1
    Console(width=None if sys.stdout.isatty() else 120).print(table_of(outcomes))
    return 0 if all(outcome.is_right for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
