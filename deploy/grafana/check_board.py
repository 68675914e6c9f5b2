"""Puts every query of the board to a real Prometheus that scrapes the real server under load: `check_board.py`.

The same for the boards that vLLM publishes. A panel passes if each of its queries has a number, and one other than 0
unless 0 is what it should be, or nothing is. Prints a table; ends with 1 if a panel does not pass, with 2 where
Prometheus is missing.
"""

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the repository's
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.local_server import ServerDidNotStart, local_server
from deploy.grafana.board_load import keep_busy
from deploy.grafana.board_queries import PanelQuery, filled, queries_of
from deploy.grafana.vllm_boards import VLLM_BOARDS
from deploy.local_prometheus import Prometheus, PrometheusMissing, QueryRefused, local_prometheus

BOARD = Path(__file__).resolve().parent / "dashboards" / "octavo.json"
MODEL = "smollm2"
# Few blocks, so that what is computed must make room; prompts of board_load.py fit well.
FLAGS = ("--model", MODEL, "--max-model-len", "512", "--num-gpu-blocks-override", "34", "--swap-space", "64MiB")
KEYS = {"reading-room": "key-of-the-reading-room", "night-shift": "key-of-the-night-shift"}
ADMIN_KEY = "key-of-the-one-who-watches"
VALUES = {
    "__rate_interval": "20s",
    "model_name": MODEL,
    "instance": ".+",
    "job": ".+",
    "engine": ".+",
    "first_token_seconds": "2.5",
    "next_token_seconds": "0.2",
    "ttft_slo": "2.5",
    "tpot_slo": "0.2",
    "Deployment_id": ".+",
    "__range": "1m",
}
# What is 0 in a server that is well, or most of the time: trouble, and waiting for a grammar to be compiled.
_MAY_BE_ZERO = (
    *("octavo_requests_dropped_total", "octavo_engine_restarts_total", "octavo_kv_cache_integrity_failures_total"),
    *("octavo_num_requests_starving", "octavo:slo_bad", "ALERTS", "up{", 'status="5xx"', 'finished_reason="error"'),
    *('reason="deferred"', 'source="external_kv_transfer"', "vllm:spec_decode_", 'sleep_state="discard_all"'),
)
# What no server of ours does; vLLM's boards leave such lines out where there is nothing to divide by.
_NEVER_DONE = ("vllm:external_prefix_cache", "vllm:mm_cache", "vllm:spec_decode_")
_PAUSE_SECONDS = 3.0

State = Literal["answered", "no series", "no number", "only zeros", "refused"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What Prometheus says to one query of a panel."""

    query: PanelQuery
    state: State
    num_series: int = 0
    message: str = ""


def ask(prometheus: Prometheus, query: PanelQuery) -> Answer:
    """Put one query as Grafana would, for this moment."""
    try:
        samples = prometheus.query(filled(query.query, VALUES))
    except QueryRefused as refusal:
        return Answer(query, "refused", message=str(refusal))
    numbers = [sample.value for sample in samples if math.isfinite(sample.value)]
    state: State = "answered"
    if not samples:
        _, _, divisor = query.query.rpartition(" / ")
        is_left_out = divisor.endswith(" > 0)") and _mentions(divisor, _NEVER_DONE)
        state = "answered" if is_left_out else "no series"
    elif not numbers:
        state = "no number"
    elif not any(numbers) and not _mentions(query.query, _MAY_BE_ZERO):
        state = "only zeros"
    return Answer(query, state, len(samples))


def _mentions(query: str, parts: Iterable[str]) -> bool:
    return any(part in query for part in parts)


def all_queries() -> list[PanelQuery]:
    """Those of our board, then those of vLLM's."""
    ours = queries_of(json.loads(BOARD.read_text()))
    theirs = [
        PanelQuery(board, panel, query)
        for board, panels in VLLM_BOARDS.items()
        for panel, queries in panels.items()
        for query in queries
    ]
    return [*ours, *theirs]


async def checked(url: str, prometheus: Prometheus, seconds: float) -> list[Answer]:
    """Ask again and again, while the server is kept busy, what has had no number yet; for so long at most."""
    stop = asyncio.Event()
    load = asyncio.create_task(keep_busy(url, MODEL, list(KEYS.values()), stop))
    answers = {query: Answer(query, "no series") for query in all_queries()}
    end = time.monotonic() + seconds
    while time.monotonic() < end and not load.done():
        await asyncio.sleep(_PAUSE_SECONDS)
        open_ones = [query for query, answer in answers.items() if answer.state != "answered"]
        for query in open_ones:
            answers[query] = await asyncio.to_thread(ask, prometheus, query)
        if all(answer.state == "answered" for answer in answers.values()):
            break
    stop.set()
    await load
    return list(answers.values())


def panels_table(answers: Iterable[Answer]) -> Table:
    """A line for each panel: how many queries it has, how many series they gave, and what is wrong."""
    panels: dict[tuple[str, str], list[Answer]] = {}
    for answer in answers:
        panels.setdefault((answer.query.board, answer.query.panel), []).append(answer)
    table = Table("Board", "Panel", "Queries", "Series", "Result")
    for (board, panel), of_panel in panels.items():
        wrong = [answer for answer in of_panel if answer.state != "answered"]
        result = "; ".join(f"{a.state}: {a.message or a.query.query}" for a in wrong) or "ok"
        table.add_row(board, panel, str(len(of_panel)), str(sum(a.num_series for a in of_panel)), result)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0, help="most time under load (default: 240)")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    flags = [*FLAGS, "--admin-api-key", ADMIN_KEY]
    for name, key in KEYS.items():
        flags += ["--api-key", f"{name}:{key}"]
    begin = time.monotonic()
    try:
        with (
            local_server(flags, api_key=ADMIN_KEY) as url,
            local_prometheus(url.removeprefix("http://"), key=ADMIN_KEY) as prometheus,
        ):
            answers = asyncio.run(checked(url, prometheus, options.seconds))
    except PrometheusMissing as missing:
        print(f"Not checked: {missing}.", file=sys.stderr)
        return 2
    except ServerDidNotStart as failure:
        print(failure, file=sys.stderr)
        return 1
    console.print(panels_table(answers))
    num_wrong = sum(answer.state != "answered" for answer in answers)
    seconds = time.monotonic() - begin
    print(f"{len(answers) - num_wrong} of {len(answers)} queries are answered as they should be ({seconds:.0f} s).")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
