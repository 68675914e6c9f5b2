"""How long one API key's short requests wait for their first token while another key's burst fills the server.

A real server, the default model, two keys. The steady key sends short requests at a constant rate: alone, beside a
burst of the other key's that comes all at once with ten times as many requests, and beside one of long prompts with
as many words. In turns, several rounds. Writes benchmarks/results/fairness.json.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import httpx
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.completion_stream import RequestFailed, stream_completion
from benchmarks.local_server import ServerDidNotStart, local_server
from benchmarks.machine import RESULTS_DIR, command_line, machine_facts, write_result
from benchmarks.prompts import make_prompts

Burst = Literal["none", "short prompts", "long prompts"]

KEYS = {"steady": "key-of-the-steady-one", "burst": "key-of-the-other-one"}
NUM_WORDS = 64  # of a short prompt
NUM_TOKENS = 16  # of the steady key's answers
NUM_BURST_TOKENS = 64
BURST_FACTOR = 10  # requests of a burst for one of the steady key's; of long prompts, as many words in all
NUM_LONG_WORDS = 2048
HEAD_START_SECONDS = 1.0  # of a burst before the first steady request
REQUEST_SECONDS = 300.0
GOAL = 2.0  # times the time to first token without a burst


@dataclass(frozen=True, slots=True)
class Phase:
    """The steady key's requests beside one kind of burst, in one round."""

    burst: Burst
    first_token_seconds: tuple[float, ...]
    num_burst_requests: int
    num_burst_left: int  # unanswered when the last steady request was; 0 = the burst was over too early
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """The steady key's time to first token beside one kind of burst, over all rounds."""

    burst: Burst
    num_requests: int
    ttft_p50: float  # seconds
    ttft_p95: float
    p50_ratio: float  # to the same without a burst
    p95_ratio: float


class Clients:
    """Both keys' clients, and prompts that never begin alike.

    In the phases of a round the steady key sends the same prompts, for some have many more tokens than others of as
    many words; each phase computes them anew.
    """

    def __init__(self, url: str, prompts: dict[int, list[str]], num_steady: int, interval: float, seed: int) -> None:
        """`prompts` are taken from by their number of words; the steady key sends every `interval` seconds or so."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._clients = {
            name: httpx.AsyncClient(
                base_url=url,
                timeout=REQUEST_SECONDS,
                limits=limits,
                trust_env=False,
                headers={"authorization": f"Bearer {key}"},
            )
            for name, key in KEYS.items()
        }
        self._prompts = prompts
        self._num_steady = num_steady
        self._interval = interval
        self._random = random.Random(seed)
        self._model = ""
        self._num_phases = 0

    async def start(self) -> None:
        """Learn the model's name and let the server do everything once."""
        models = (await self._clients["steady"].get("/v1/models")).raise_for_status()
        self._model = models.json()["data"][0]["id"]
        await self._send("burst", self.take(1, NUM_LONG_WORDS)[0], NUM_TOKENS)
        await asyncio.gather(*(self._send("steady", prompt, NUM_TOKENS) for prompt in self.take(8)))

    def take(self, count: int, num_words: int = NUM_WORDS) -> list[str]:
        """Prompts that nobody has sent."""
        return [self._prompts[num_words].pop() for _ in range(count)]

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            await client.aclose()

    async def run_phase(self, burst: Burst, prompts: Sequence[str], on_answer: Callable[[], None]) -> Phase:
        """One burst, the steady requests with their prompts beside it, and the end of what is left of the burst."""
        num_words = NUM_LONG_WORDS if burst == "long prompts" else NUM_WORDS
        num_requests = 0 if burst == "none" else BURST_FACTOR * self._num_steady * NUM_WORDS // num_words
        errors: list[str] = []
        crowd = [
            asyncio.create_task(self._send("burst", prompt, NUM_BURST_TOKENS))
            for prompt in self.take(num_requests, num_words)
        ]
        salt = f"phase {self._num_phases}"
        self._num_phases += 1
        await asyncio.sleep(HEAD_START_SECONDS)
        steady = []
        for prompt in prompts:
            steady.append(asyncio.create_task(self._send("steady", prompt, NUM_TOKENS, salt)))
            # Steps are nearly as long as each other: requests at a constant rate could all meet the same part of one.
            await asyncio.sleep(self._interval * self._random.uniform(0.5, 1.5))
        first_tokens = []
        for task in steady:
            try:
                first_tokens.append(await task)
            except RequestFailed as failure:
                errors.append(f"steady: {failure}")
            on_answer()
        left = [task for task in crowd if not task.done()]
        for task in left:
            task.cancel()
        for task in crowd:
            with suppress(asyncio.CancelledError):
                try:
                    await task
                except RequestFailed as failure:
                    errors.append(f"burst: {failure}")
        await asyncio.sleep(HEAD_START_SECONDS)  # the server ends what nobody waits for
        return Phase(burst, tuple(first_tokens), num_requests, len(left), tuple(errors))

    async def _send(self, name: str, prompt: str, num_tokens: int, salt: str | None = None) -> float:
        """Seconds to the first token of one answer. Raises RequestFailed."""
        answer = await stream_completion(self._clients[name], self._model, prompt, num_tokens, salt)
        return answer.first_token_seconds


def figures_of(phases: Sequence[Phase]) -> list[Figures]:
    """Each kind of burst beside none, over the requests of all rounds."""
    by_burst = {
        burst: [seconds for phase in phases if phase.burst == burst for seconds in phase.first_token_seconds]
        for burst in get_args(Burst)
    }
    alone = np.percentile(by_burst["none"], (50, 95))
    figures = []
    for burst, seconds in by_burst.items():
        if seconds:
            beside = np.percentile(seconds, (50, 95))
            figures.append(Figures(burst, len(seconds), *beside.tolist(), *(beside / alone).tolist()))
    return figures


async def measure(url: str, options: argparse.Namespace, progress: Progress) -> list[Phase]:
    """All phases of all rounds, in turns."""
    num_long = options.rounds * BURST_FACTOR * options.requests * NUM_WORDS // NUM_LONG_WORDS
    num_short = options.rounds * options.requests * (BURST_FACTOR + 1)
    prompts = {
        NUM_WORDS: make_prompts(num_short + 8, NUM_WORDS, options.seed),
        NUM_LONG_WORDS: make_prompts(num_long + 1, NUM_LONG_WORDS, options.seed),
    }
    clients = Clients(url, prompts, options.requests, options.interval, options.seed)
    task = progress.add_task("warm-up", total=options.rounds * options.requests * len(options.bursts))
    phases = []
    try:
        await clients.start()
        for number in range(1, options.rounds + 1):
            prompts_of_round = clients.take(options.requests)
            for burst in options.bursts:
                progress.update(task, description=f"round {number} of {options.rounds}, burst: {burst}")
                phases.append(await clients.run_phase(burst, prompts_of_round, lambda: progress.advance(task)))
    finally:
        await clients.close()
    return phases


def show(console: Console, figures: Sequence[Figures], phases: Sequence[Phase]) -> None:
    """A line for each kind of burst, then what went wrong."""
    table = Table(
        title=f"The steady key's time to first token; the goal is at most {GOAL:g} times that without a burst"
    )
    for column in ("burst of the other key", "requests", "p50, ms", "p95, ms", "p50 ratio", "p95 ratio"):
        table.add_column(column, justify="left" if column.startswith("burst") else "right")
    for row in figures:
        times = (f"{row.ttft_p50 * 1e3:,.0f}", f"{row.ttft_p95 * 1e3:,.0f}")
        table.add_row(row.burst, str(row.num_requests), *times, f"{row.p50_ratio:.2f}", f"{row.p95_ratio:.2f}")
    console.print(table)
    for phase in phases:
        if phase.burst != "none" and not phase.num_burst_left:
            console.print(f"A burst of {phase.burst} was over before the steady requests: send fewer, or faster.")
        for error in sorted(set(phase.errors)):
            console.print(f"{phase.burst}: {error}", markup=False, highlight=False)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="One key's time to first token beside another key's burst.")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind of burst (default: 3)")
    parser.add_argument("--requests", type=int, default=24, help="of the steady key in a round (default: 24)")
    parser.add_argument("--interval", type=float, default=0.4, help="mean seconds between them (default: 0.4)")
    parser.add_argument("--bursts", nargs="+", choices=get_args(Burst), default=get_args(Burst), help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other prompts (default: 0)")
    parser.add_argument("--output", type=Path, default=RESULTS_DIR / "fairness.json")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="flags of the server, last of all")
    return parser.parse_args()


def main() -> int:
    """Measure, print, write; 1 if a request failed or a burst was over too early, 2 if the goal is missed."""
    options = parse_options()
    console = Console(stderr=True)
    facts = machine_facts()
    keys = [part for name, key in KEYS.items() for part in ("--api-key", f"{name}:{key}")]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with (
            local_server([*keys, *options.serve], api_key=KEYS["steady"]) as url,
            Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ):
            start = time.perf_counter()
            phases = asyncio.run(measure(url, options, progress))
            seconds = time.perf_counter() - start
    except (ServerDidNotStart, RequestFailed, httpx.HTTPError) as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    figures = figures_of(phases)
    show(console, figures, phases)
    result = {
        "question": "how much longer one key's short requests wait for their first token beside another key's burst",
        "command": command_line(),
        "machine": facts,
        "server": " ".join(["started by the benchmark, default settings and two keys", *options.serve]),
        "seconds": round(seconds, 1),
        "steady": {
            "requests": options.requests,
            "interval": options.interval,
            "words": NUM_WORDS,
            "tokens": NUM_TOKENS,
        },
        "burst": {"factor": BURST_FACTOR, "words": [NUM_WORDS, NUM_LONG_WORDS], "tokens": NUM_BURST_TOKENS},
        "goal": GOAL,
        "unit": "seconds",
        "figures": [asdict(row) for row in figures],
        "phases": [asdict(phase) for phase in phases],
    }
    write_result(options.output, result)
    if any(phase.errors or (phase.burst != "none" and not phase.num_burst_left) for phase in phases):
        return 1
    return 0 if all(max(row.p50_ratio, row.p95_ratio) <= GOAL for row in figures) else 2


if __name__ == "__main__":
    sys.exit(main())
