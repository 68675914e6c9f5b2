"""Output tokens per second and latencies of a server at 1, 8 and 32 clients: the first baseline.

Closed loop: each client sends its next request when the last one is answered. Prompts of 128 words, all different, and
64 tokens each. Without --url it starts `octavo serve` itself. Writes benchmarks/results/baseline.json.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean, median

import httpx
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.completion_stream import RequestFailed, TimedAnswer, stream_completion
from benchmarks.local_server import ServerDidNotStart, local_server
from benchmarks.machine import RESULTS_DIR, command_line, machine_facts, write_result
from benchmarks.prompts import make_prompts

CLIENTS = (1, 8, 32)
NUM_WORDS = 128
NUM_TOKENS = 64
REQUEST_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Round:
    """What a number of clients got from the server until all prompts of the round were answered."""

    seconds: float
    answers: tuple[TimedAnswer, ...]
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """A round in numbers. Of several rounds: the median of each number."""

    output_tokens_per_second: float
    ttft_p50: float  # seconds to the first token
    ttft_p90: float
    inter_token_p50: float  # seconds between tokens of one answer
    inter_token_p90: float


@dataclass(frozen=True, slots=True)
class Load:
    """All rounds of one number of clients."""

    num_clients: int
    requests_per_round: int
    median: Figures | None  # None: no request was answered
    rounds: tuple[Figures, ...]
    errors: dict[str, int]  # message -> how often


def num_requests(num_clients: int) -> int:
    """Requests of a round: two for each client, and enough for a median where clients are few."""
    return max(4, 2 * num_clients)


def figures_of(one_round: Round) -> Figures:
    """The figures of a round with at least one answer. Percentiles are over all requests, or all gaps, of the round."""
    first = [answer.first_token_seconds for answer in one_round.answers]
    gaps = [gap for answer in one_round.answers for gap in answer.inter_token_seconds]
    num_tokens = sum(answer.num_output_tokens for answer in one_round.answers)
    ttft, inter_token = np.percentile(first, (50, 90)).tolist(), np.percentile(gaps, (50, 90)).tolist()
    return Figures(num_tokens / one_round.seconds, *ttft, *inter_token)


def median_figures(rounds: Sequence[Figures]) -> Figures:
    """The median of each figure over the rounds."""
    return Figures(*(median(getattr(figures, field.name) for figures in rounds) for field in fields(Figures)))


def load_of(num_clients: int, rounds: Sequence[Round]) -> Load:
    """Put the rounds of one number of clients together; rounds without any answer have no figures."""
    each = tuple(figures_of(one_round) for one_round in rounds if one_round.answers)
    errors = Counter(error for one_round in rounds for error in one_round.errors)
    return Load(num_clients, num_requests(num_clients), median_figures(each) if each else None, each, dict(errors))


async def run_round(
    client: httpx.AsyncClient, model: str, prompts: Sequence[str], num_clients: int, on_answer: Callable[[], None]
) -> Round:
    """Let `num_clients` clients send all prompts, each the next one as soon as its last is answered or has failed."""
    waiting = iter(prompts)
    answers: list[TimedAnswer] = []
    errors: list[str] = []

    async def one_client() -> None:
        for prompt in waiting:
            try:
                answers.append(await stream_completion(client, model, prompt, NUM_TOKENS))
            except RequestFailed as failure:
                errors.append(str(failure))
            on_answer()

    start = time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(num_clients)))
    return Round(time.perf_counter() - start, tuple(answers), tuple(errors))


async def run_all(url: str, num_rounds: int, seed: int, progress: Progress) -> tuple[str, float, list[Load]]:
    """The model's name, the mean number of tokens of a prompt, and one load for each number of clients, in turns."""
    prompts = iter(make_prompts(1 + num_rounds * sum(map(num_requests, CLIENTS)), NUM_WORDS, seed))
    task = progress.add_task("warm-up", total=num_rounds * sum(map(num_requests, CLIENTS)))
    rounds: dict[int, list[Round]] = {num_clients: [] for num_clients in CLIENTS}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    # No proxy between the clients and the server.
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS, limits=limits, trust_env=False) as client:
        models = (await client.get("/v1/models")).raise_for_status()
        model: str = models.json()["data"][0]["id"]
        await run_round(client, model, [next(prompts)], 1, lambda: None)
        for number in range(1, num_rounds + 1):
            for num_clients in CLIENTS:
                progress.update(task, description=f"round {number} of {num_rounds}, {num_clients} clients")
                batch = [next(prompts) for _ in range(num_requests(num_clients))]
                one_round = await run_round(client, model, batch, num_clients, lambda: progress.advance(task))
                rounds[num_clients].append(one_round)
    lengths = [a.num_prompt_tokens for of_load in rounds.values() for one_round in of_load for a in one_round.answers]
    loads = [load_of(num_clients, of_load) for num_clients, of_load in rounds.items()]
    return model, mean(lengths) if lengths else 0.0, loads


def print_loads(console: Console, loads: Sequence[Load]) -> None:
    """One line for each number of clients, then the errors."""
    title = f"{NUM_WORDS}-word prompts, {NUM_TOKENS} tokens each; medians of the rounds"
    table = Table(title=title)
    for column in ("clients", "output tokens/s", "TTFT p50, ms", "p90", "inter-token p50, ms", "p90", "errors"):
        table.add_column(column, justify="right")
    for load in loads:
        cells = [""] * len(fields(Figures))
        if load.median is not None:
            speed, *latencies = (getattr(load.median, field.name) for field in fields(Figures))
            cells = [f"{speed:,.1f}", *(f"{seconds * 1e3:,.0f}" for seconds in latencies)]
        table.add_row(str(load.num_clients), *cells, str(sum(load.errors.values())))
    console.print(table)
    for load in loads:
        for error, count in load.errors.items():
            console.print(f"{load.num_clients} clients, {count} times: {error}", markup=False, highlight=False)


@contextmanager
def server_at(url: str | None, console: Console) -> Iterator[str]:
    """The given server, or one started for the occasion."""
    if url is not None:
        yield url.rstrip("/").removesuffix("/v1")
        return
    with console.status("Starting the server") as status, local_server() as own_url:
        status.stop()
        yield own_url


def main() -> int:
    """Measure, print and write the result; 1 if a request failed."""
    parser = argparse.ArgumentParser(description="Tokens per second and latencies at 1, 8 and 32 clients.")
    parser.add_argument("--url", help="server to measure, such as http://127.0.0.1:8000 (default: starts its own)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each number of clients (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other prompts (default: 0)")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, help="folder for the result")
    options = parser.parse_args()
    console = Console(stderr=True)
    facts = machine_facts()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with (
            server_at(options.url, console) as url,
            Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ):
            model, prompt_tokens, loads = asyncio.run(run_all(url, options.rounds, options.seed, progress))
    except (ServerDidNotStart, httpx.HTTPError) as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    print_loads(console, loads)
    result = {
        "question": "output tokens per second, time to first token and between tokens, at 1, 8 and 32 clients",
        "command": command_line(),
        "machine": facts,
        "server": "started by the benchmark, default settings" if options.url is None else url,
        "model": model,
        "prompt_words": NUM_WORDS,
        "prompt_tokens_mean": round(prompt_tokens, 1),
        "output_tokens": NUM_TOKENS,
        "unit": "seconds",
        "loads": [asdict(load) for load in loads],
    }
    write_result(options.results / "baseline.json", result)
    return 1 if any(load.errors for load in loads) else 0


if __name__ == "__main__":
    sys.exit(main())
