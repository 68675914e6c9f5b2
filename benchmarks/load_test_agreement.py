"""Whether `octavo load-test` measures what another client measures on the same load.

The other client shares no code with it: a thread for each request, http.client of the standard library, and medians by
the statistics module. Both send the same prompts to the same server in the same minutes, so that they meet the same
machine, busy or not: of each two equal requests, one client's comes first and the other's a little later, in turns.
What each says of the median time to the first token, between pieces of text, per token and to the end may differ by
3 %.

Two servers are asked: a paced one, which answers by the clock, so that the true times are known, and `octavo serve`.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.local_server import local_server
from benchmarks.machine import RESULTS_DIR, ROOT, command_line, machine_facts, write_result
from benchmarks.markdown_table import markdown_table
from benchmarks.prompts import make_prompts
from benchmarks.server_process import free_port, server_process

LIMIT = 0.03
NAMES = ("first token", "between pieces", "per token", "whole answer")
PACE_SECONDS = 0.1  # of each token of the paced server, the first included
START_SECONDS = 20.0  # until both clients start together, warmed up
BEHIND_SECONDS = 0.3  # from the first of two equal requests to the second, which mostly finds the first one answered
_READY_SECONDS = 30.0

Medians = dict[str, float]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LoadShape:
    """What both clients send."""

    num_requests: int
    rate: float  # requests per second, of each client
    num_words: int  # of a prompt
    num_tokens: int  # of an answer


LOADS = {"paced": LoadShape(100, 4.0, 20, 12), "octavo": LoadShape(240, 1.0, 120, 16)}


def main() -> int:
    """Send the loads, print a table for each server, keep the result; 1 if the two clients do not agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", choices=tuple(LOADS), default=list(LOADS), help="(default: both)")
    parser.add_argument("--json", type=Path, default=RESULTS_DIR / "load_test_agreement.json", help="result file")
    options = parser.parse_args()
    results = {name: measure(name) for name in options.servers}
    result = {
        "machine": machine_facts(),
        "command": command_line(),
        "limit": LIMIT,
        "servers": results,
    }
    write_result(options.json, result)
    return 0 if all(each["is_agreed"] for each in results.values()) else 1


def measure(name: str) -> dict[str, Any]:
    """Let both clients measure one server at once; prints what came of it."""
    shape = LOADS[name]
    ours, others = make_loads(shape)
    with started(name) as url, tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        path = write_rows(Path(folder) / "load.jsonl", ours)
        start = time.time() + START_SECONDS
        other = pool.submit(other_client, url, others, start)
        compared = compare(load_test(url, path, start), other.result())
    is_agreed = all(abs(row["ratio"] - 1) <= LIMIT for row in compared.values())
    print(f"{name}: {'the two agree' if is_agreed else 'the two do not agree'}\n\n{to_table(compared)}\n")
    return {"load": asdict(shape), "medians": compared, "is_agreed": is_agreed}


@contextmanager
def started(name: str) -> Iterator[str]:
    """A running server; its URL."""
    if name == "octavo":
        # Without a prefix cache: the second client would find there what the first one asked.
        with local_server(("--no-enable-prefix-caching",)) as url:
            yield url
        return
    port = free_port()
    command = [sys.executable, "-m", "tests.benchmarks.scripted_server", "--port", str(port)]
    with server_process([*command, "--delay", str(PACE_SECONDS)], f"http://127.0.0.1:{port}", ROOT, {}) as process:
        process.wait_until_ready("/health", _READY_SECONDS, {})
        yield process.url


def make_loads(shape: LoadShape) -> tuple[list[Row], list[Row]]:
    """What each client sends: rows of a file of prompts with times; Poisson arrivals, all prompts different.

    Each client comes first in half of the pairs.
    """
    chance = random.Random(1)
    now = 0.0
    ours: list[Row] = []
    others: list[Row] = []
    for number, prompt in enumerate(make_prompts(shape.num_requests, shape.num_words, seed=2)):
        pair = [{"at": at, "prompt": prompt, "max_tokens": shape.num_tokens} for at in (now, now + BEHIND_SECONDS)]
        ours.append(pair[number % 2])
        others.append(pair[1 - number % 2])
        now += chance.expovariate(shape.rate)
    return ours, others


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    """As `octavo load-test --prompts` reads them."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def compare(ours: Medians, others: Medians) -> dict[str, dict[str, float]]:
    """Both clients' medians, in seconds, and their ratio."""
    return {
        name: {"load_test": ours[name], "other_client": others[name], "ratio": ours[name] / others[name]}
        for name in NAMES
    }


def to_table(compared: Mapping[str, Mapping[str, float]]) -> str:
    """For a page."""
    rows = [
        (name, f"{row['load_test'] * 1000:.2f}", f"{row['other_client'] * 1000:.2f}", f"{row['ratio']:.3f}")
        for name, row in compared.items()
    ]
    return markdown_table(("median, ms", "octavo load-test", "other client", "ratio"), rows)


def load_test(url: str, path: Path, start_at: float | None = None) -> Medians:
    """The medians that `octavo load-test` reports."""
    out = path.with_suffix(".json")
    command = [sys.executable, "-m", "server.cli", "load-test", url, "--prompts", str(path), "--ignore-eos"]
    if start_at is not None:
        command += ["--start-at", str(start_at)]
    done = subprocess.run([*command, "--json", str(out), "--no-progress"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"octavo load-test failed: {done.stderr}{done.stdout}")
    summary = json.loads(out.read_text(encoding="utf-8"))["summary"]
    if summary["num_answered"] != summary["num_requests"]:
        raise SystemExit(f"Not all requests were answered: {summary['errors']}")
    fields = ("ttft", "itl", "tpot", "end_to_end")
    return {name: summary[field]["percentiles"]["p50"] for name, field in zip(NAMES, fields, strict=True)}


def other_client(url: str, rows: Sequence[Row], start_at: float | None = None) -> Medians:
    """The same load by threads, from `start_at` (Unix time) on."""
    address = urlsplit(url).netloc
    model = _ask_model(address)
    for row in rows[:2]:
        _Request(address, model, row, time.monotonic()).run()  # warms up, as the load test does
    begin = time.monotonic() + (0.5 if start_at is None else start_at - time.time())
    requests = [_Request(address, model, row, begin + row["at"]) for row in rows]
    threads = [threading.Thread(target=request.run) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gaps = [b - a for request in requests for a, b in zip(request.times, request.times[1:], strict=False)]
    return {
        "first token": median(request.times[0] - request.due for request in requests),
        "between pieces": median(gaps),
        "per token": median((request.times[-1] - request.times[0]) / (request.num_tokens - 1) for request in requests),
        "whole answer": median(request.end - request.due for request in requests),
    }


class _Request:
    """One request in a thread of its own."""

    def __init__(self, address: str, model: str, row: Row, due: float) -> None:
        self.due = due
        self.times: list[float] = []
        self.end = 0.0
        self.num_tokens = 0
        self._address = address
        body = {"model": model, "prompt": row["prompt"], "max_tokens": row["max_tokens"], "stream": True}
        self._body = json.dumps({**body, "ignore_eos": True, "stream_options": {"include_usage": True}})

    def run(self) -> None:
        time.sleep(max(0.0, self.due - time.monotonic()))
        connection = HTTPConnection(self._address, timeout=300)
        connection.request("POST", "/v1/completions", self._body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read()[:200]!r}")
        while line := response.readline():
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            event = json.loads(line[6:])
            if event["choices"] and event["choices"][0]["text"]:
                self.times.append(now)
            if event.get("usage"):
                self.num_tokens = event["usage"]["completion_tokens"]
        self.end = time.monotonic()
        connection.close()


def _ask_model(address: str) -> str:
    connection = HTTPConnection(address, timeout=30)
    connection.request("GET", "/v1/models")
    model: str = json.loads(connection.getresponse().read())["data"][0]["id"]
    connection.close()
    return model


if __name__ == "__main__":
    sys.exit(main())
