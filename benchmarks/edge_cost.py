"""What a request and a streamed token take of the processors beside the model: by process, in microseconds.

Starts `octavo serve` with a stand-in for the model (benchmarks/paced_server.py) or, with --model, with the real one,
and lets clients stream answers of one token and of many: the difference tells a token's cost, and the rest is the
request's. Writes benchmarks/results/edge_cost.json.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import paced_server
from benchmarks.local_server import local_server
from benchmarks.machine import RESULTS_DIR, command_line, machine_facts, write_result
from benchmarks.paced_server import PACE, busy_seconds
from benchmarks.packet_client import PacketClient, Packets
from benchmarks.processor_time import ProcessorTime, child_running, processor_time
from benchmarks.prompts import make_prompts

CONCURRENCIES = (1, 8, 32)
NUM_WORDS = 128
NUM_TOKENS = 64
_ANSWER_SECONDS = 120.0
Request = tuple[str, dict[str, object]]  # path and body
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Round:
    """What answering some requests took, per request."""

    server: ProcessorTime
    engine: ProcessorTime
    client_seconds: float
    wall_seconds: float


@dataclass(frozen=True, slots=True)
class EdgeCost:
    """Medians over the rounds, in microseconds of processor time; of the engine, what is not the model's."""

    kind: str
    num_clients: int
    server_per_token: float
    engine_per_token: float
    client_per_token: float
    wall_per_token: float  # with the model's time
    server_wakeups_per_token: float
    engine_wakeups_per_token: float
    server_wait_per_token: float  # ready to run, and no core free
    server_per_request: float  # with its first token
    engine_per_request: float
    client_per_request: float


class Measured:
    """One server's processes."""

    def __init__(self, server_id: int, engine_id: int, port: int, pace: Path | None) -> None:
        """`pace` is where the stand-in counts; None: the engine's model is real, and its time no measure of an edge."""
        self._ids = server_id, engine_id
        self._port = port
        self._pace = pace

    def round(self, kind: str, prompts: Sequence[str], num_tokens: int, num_clients: int) -> Round:
        """Stream one answer of so many tokens to each prompt."""
        requests = [_request(kind, prompt, num_tokens) for prompt in prompts]
        before, client_before, began = self._now(), time.process_time(), time.perf_counter()
        answers = asyncio.run(_stream_all(PacketClient(self._port, _ANSWER_SECONDS), requests, num_clients))
        wall, client = time.perf_counter() - began, time.process_time() - client_before
        server, engine = (now - then for now, then in zip(self._now(), before, strict=True))
        for answer in answers:
            _refuse_incomplete(answer, num_tokens)
        num = len(prompts)
        return Round(server / num, engine / num, client / num, wall / num)

    def _now(self) -> tuple[ProcessorTime, ProcessorTime]:
        server, engine = map(processor_time, self._ids)
        busy = 0.0 if self._pace is None else busy_seconds(self._pace)
        return server, engine - ProcessorTime(busy, 0.0, 0, busy)


async def _stream_all(client: PacketClient, requests: Sequence[Request], num_clients: int) -> list[Packets]:
    """All answers; each client asks again when it has its answer."""
    left = iter(requests)
    answers: list[Packets] = []

    async def ask() -> None:
        for path, body in left:
            answers.append(await client.post(path, body))

    await asyncio.gather(*(ask() for _ in range(num_clients)))
    return answers


def _refuse_incomplete(answer: Packets, num_tokens: int) -> None:
    """Raise RuntimeError for what is not an answer of so many tokens, but for those that share an event."""
    data = b"".join(packet for _, packet in answer.received)
    if answer.error or b"data: [DONE]" not in data or data.count(b"data: ") < num_tokens * 0.9:
        raise RuntimeError(f"no whole answer came: {answer.error or data[:300].decode('utf-8', 'replace')}")


def _request(kind: str, prompt: str, num_tokens: int) -> Request:
    """Path and body."""
    asked = {"prompt": prompt} if kind == "completions" else {"messages": [{"role": "user", "content": prompt}]}
    return _PATHS[kind], {**asked, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}


def measure(server: Measured, kind: str, num_clients: int, num_requests: int, num_rounds: int) -> EdgeCost:
    """Rounds of short and of long answers by turns, after one that warms up."""
    prompts = make_prompts((2 * num_rounds + 1) * num_requests, NUM_WORDS, seed=num_clients)
    parts = [prompts[start : start + num_requests] for start in range(0, len(prompts), num_requests)]
    server.round(kind, parts.pop(), NUM_TOKENS, num_clients)
    costs = []
    for _ in range(num_rounds):
        short = server.round(kind, parts.pop(), 1, num_clients)
        long = server.round(kind, parts.pop(), NUM_TOKENS, num_clients)
        costs.append(_cost(kind, num_clients, short, long))
    columns = zip(*(list(asdict(cost).values())[2:] for cost in costs), strict=True)
    return EdgeCost(kind, num_clients, *(round(median(column), 2) for column in columns))


def _cost(kind: str, num_clients: int, short: Round, long: Round) -> EdgeCost:
    server, engine = long.server - short.server, long.engine - short.engine
    scale = 1e6 / (NUM_TOKENS - 1)
    return EdgeCost(
        kind,
        num_clients,
        server_per_token=server.seconds * scale,
        engine_per_token=engine.seconds * scale,
        client_per_token=(long.client_seconds - short.client_seconds) * scale,
        wall_per_token=(long.wall_seconds - short.wall_seconds) * scale,
        server_wakeups_per_token=server.num_wakeups * scale / 1e6,
        engine_wakeups_per_token=engine.num_wakeups * scale / 1e6,
        server_wait_per_token=server.waited * scale,
        server_per_request=short.server.seconds * 1e6,
        engine_per_request=short.engine.seconds * 1e6,
        client_per_request=short.client_seconds * 1e6,
    )


@contextmanager
def measured_server(model: str | None, flags: Sequence[str]) -> Iterator[Measured]:
    """A server on a free port, with the stand-in unless a model is named."""
    with tempfile.TemporaryDirectory() as folder:
        pace = None if model is not None else Path(folder) / "busy"
        module = "server.cli"
        if pace is None:
            flags = ("--model", str(model), *flags)
        else:
            pace.write_bytes(bytes(8))
            module, flags = "benchmarks.paced_server", (PACE, str(pace), *flags)
        with local_server(flags, module=module) as url:
            port = urlsplit(url).port
            assert port is not None
            server_id = child_running(os.getpid(), str(port))
            engine_id = child_running(server_id, "server.engine_process" if pace is None else paced_server.__file__)
            yield Measured(server_id, engine_id, port, pace)


def print_costs(console: Console, costs: Sequence[EdgeCost]) -> None:
    """One line per load."""
    columns = ("server", "engine", "client", "wall", "server wakes", "engine wakes", "server waits")
    names = ("server, request", "engine, request", "client, request")
    table = Table("kind", "clients", *columns, *names, title="µs per streamed token, and per request with its first")
    for cost in costs:
        values = list(asdict(cost).values())
        table.add_row(
            cost.kind,
            str(cost.num_clients),
            *(
                f"{value:.2f}" if "wake" in name else f"{value:.0f}"
                for name, value in zip((*columns, *names), values[2:], strict=True)
            ),
        )
    console.print(table)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Processor time of a streamed token and of a request, by process.")
    parser.add_argument("--model", help="serve this model, in place of the stand-in")
    parser.add_argument("--kind", choices=tuple(_PATHS), action="append", help="of requests (default: both)")
    parser.add_argument("--clients", type=int, nargs="+", default=CONCURRENCIES, help="at once (default: 1 8 32)")
    parser.add_argument("--requests", type=int, default=64, help="of each round (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, help="whose medians are reported (default: 3)")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, help="folder for the result")
    parser.add_argument("flags", nargs="*", help="of octavo serve, after --")
    options = parser.parse_args()
    facts = machine_facts()
    costs = []
    with measured_server(options.model, options.flags) as server:
        for kind in options.kind or _PATHS:
            for num_clients in options.clients:
                costs.append(measure(server, kind, num_clients, options.requests, options.rounds))
    print_costs(Console(stderr=True, width=140), costs)
    result = {
        "question": "processor time of a streamed token and of a request beside the model, by process",
        "command": command_line(),
        "machine": facts,
        "model": options.model or "a stand-in",
        "num_words": NUM_WORDS,
        "num_tokens": NUM_TOKENS,
        "unit": "microseconds",
        "costs": [asdict(cost) for cost in costs],
    }
    write_result(options.results / "edge_cost.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
