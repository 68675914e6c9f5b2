"""Octavo beside llama.cpp's server and vLLM: the same model, machine and loads, in turns; ratios with the goals beside.

Installs nothing: give the peers that are there by --llama-server and --vllm. All servers are started once and stay
loaded; one that computes with nothing to do is held still while others are measured. Writes
benchmarks/results/peers.json and docs/peers.md.
"""

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS_DIR, ROOT, command_line, machine_facts, write_result, write_whole
from benchmarks.peer_checkpoint import CheckpointNotWritten, write_checkpoint
from benchmarks.peer_loads import Load, Point, RoundResult, Texts, make_texts
from benchmarks.peer_ratios import PointResult, medians, of_server, summary
from benchmarks.peer_report import report
from benchmarks.peer_servers import OCTAVO, LoadedServer, ServerPlan, llama_plan, loaded_server, octavo_plan, vllm_plan
from benchmarks.server_process import ServerDidNotStart
from server.model_store import ModelStoreError, resolve

REQUEST_SECONDS = 600.0
NUM_SLOTS = 32
POINTS = (
    Point("completions", 128, 64, 1, num_jobs=4, num_rounds=5),
    Point("completions", 128, 64, 8, num_jobs=16, num_rounds=4),
    Point("completions", 128, 64, 32, num_jobs=64, num_rounds=3),
    Point("completions", 128, 256, 1, num_jobs=2, num_rounds=3),
    Point("completions", 128, 256, 8, num_jobs=8, num_rounds=3),
    Point("completions", 128, 256, 32, num_jobs=32, num_rounds=2),
    Point("completions", 1024, 64, 1, num_jobs=3, num_rounds=3),
    Point("completions", 1024, 64, 8, num_jobs=8, num_rounds=3),
    Point("completions", 1024, 64, 32, num_jobs=32, num_rounds=2),
    Point("completions", 1024, 256, 1, num_jobs=2, num_rounds=3),
    Point("completions", 1024, 256, 8, num_jobs=8, num_rounds=2),
    Point("completions", 1024, 256, 32, num_jobs=32, num_rounds=1),
    Point("chats", 800, 64, 1, num_jobs=1, num_rounds=3),
    Point("chats", 800, 64, 8, num_jobs=8, num_rounds=3),
    Point("chats", 800, 64, 32, num_jobs=32, num_rounds=1),
)
QUICK_POINTS = (
    Point("completions", 128, 64, 1, num_jobs=2, num_rounds=2),
    Point("completions", 128, 64, 8, num_jobs=8, num_rounds=2),
    Point("chats", 800, 64, 8, num_jobs=8, num_rounds=1),
)


class Measurement:
    """Rounds of all points on all servers, in turns, until they are done or the time is up."""

    def __init__(self, servers: Sequence[LoadedServer], points: Sequence[Point], seed: int, console: Console) -> None:
        """Nothing is asked yet."""
        self._servers = servers
        self._points = points
        self._num_rounds = max(point.num_rounds for point in points)
        self._texts = make_texts(points, self._num_rounds, seed)
        self._console = console
        self._rounds: dict[Point, list[dict[str, RoundResult]]] = {point: [] for point in points}
        self._seconds: dict[Point, float] = {}
        self.left_out: list[str] = []

    async def run(self, deadline: float) -> list[PointResult]:
        """Measure. After the first round, what would not be done by `deadline` (time.monotonic) is left out."""
        visits = [(number, index) for number in range(self._num_rounds) for index in range(len(self._points))]
        for number, index in visits:
            point = self._points[index]
            if number >= point.num_rounds:
                continue
            if number and time.monotonic() + self._seconds[point] > deadline:
                self.left_out.append(f"round {number + 1} of {point.label}, {point.num_clients} clients: time was up")
                continue
            first = (number + index) % len(self._servers)
            order = [*self._servers[first:], *self._servers[:first]]
            begin = time.monotonic()
            self._rounds[point].append(
                {server.plan.name: await self._turn(server, point, self._texts[point, number]) for server in order}
            )
            self._seconds[point] = time.monotonic() - begin
            self._say(number, point)
        return [PointResult(point, tuple(rounds)) for point, rounds in self._rounds.items()]

    async def _turn(self, server: LoadedServer, point: Point, texts: Texts) -> RoundResult:
        try:
            server.begin_turn()
            load = Load(server.port, server.model, point, REQUEST_SECONDS)
            return await load.run(texts, server.process.processor_seconds)
        except ServerDidNotStart:
            state = "is not ready any more" if server.process.is_running() else "has ended"
            return RoundResult(None, 0.0, 0, 0.0, None, 0.0, None, {f"the server {state}": 1})
        finally:
            server.end_turn()

    def _say(self, number: int, point: Point) -> None:
        results = self._rounds[point][-1]
        speeds = ", ".join(
            f"{name} {result.figures.output_tokens_per_second:.1f}" if result.figures else f"{name} failed"
            for name, result in results.items()
        )
        clients = f"{point.num_clients} client{'s' if point.num_clients > 1 else ''}"
        self._console.print(
            f"round {number + 1}, {point.label}, {clients}: {speeds} output tokens/s; {self._seconds[point]:.0f} s",
            highlight=False,
        )


def measure(
    plans: Sequence[ServerPlan], points: Sequence[Point], seed: int, deadline: float, console: Console
) -> dict[str, Any]:
    """Start the servers, measure those that got ready, and put the result together."""
    facts = machine_facts()
    not_started: dict[str, str] = {}
    loaded: list[LoadedServer] = []
    with ExitStack() as stack:
        for plan in plans:
            try:
                server = stack.enter_context(loaded_server(plan))
            except ServerDidNotStart as error:
                not_started[plan.name] = str(error)
                console.print(f"{plan.name} did not start: {error}", markup=False, highlight=False)
                continue
            server.end_turn()
            loaded.append(server)
            console.print(f"{plan.name} {server.version}: ready after {server.start_seconds:.1f} s", highlight=False)
        if not loaded:
            return {"machine": facts, "servers": [_described(plan, None, not_started) for plan in plans], "points": []}
        measurement = Measurement(loaded, points, seed, console)
        results = uvloop.run(measurement.run(deadline))
        by_name = {server.plan.name: server for server in loaded}
        servers = [_described(plan, by_name.get(plan.name), not_started) for plan in plans]
    return {
        "machine": facts,
        "servers": servers,
        "points": [_point_result(result, [server.plan.name for server in loaded]) for result in results],
        "left_out": measurement.left_out,
    }


def _described(plan: ServerPlan, server: LoadedServer | None, not_started: dict[str, str]) -> dict[str, Any]:
    described: dict[str, Any] = {"name": plan.name, "command": plan.shown_command, "why": plan.why}
    if server is None:
        return {**described, "version": None, "error": not_started[plan.name].strip().splitlines()[-1]}
    return {
        **described,
        "version": server.version,
        "start_seconds": server.start_seconds,
        "idle_processors": server.idle_processors,
        "is_held": server.is_held,
        "error": None if server.process.is_running() else "the server ended while it was measured",
    }


def _point_result(result: PointResult, servers: Sequence[str]) -> dict[str, Any]:
    return {
        **asdict(result.point),
        "label": result.point.label,
        "servers": {server: medians(of_server(result, server)) for server in servers},
        **summary(result, [server for server in servers if server != OCTAVO]),
        "rounds": [{name: asdict(one) for name, one in by_server.items()} for by_server in result.rounds],
    }


def print_points(console: Console, result: dict[str, Any]) -> None:
    """One line for each point: speeds, and ratios against the best peer."""
    names = [server["name"] for server in result["servers"] if server["version"] is not None]
    table = Table(title="output tokens/s, and ratios against the best peer (medians)")
    table.add_column("load")
    for column in ("clients", *names, "ratio", "goal", "TTFT ratio", "goal", "errors"):
        table.add_column(column, justify="right")
    for point in result["points"]:
        speeds = [_text(point["servers"][name]["output_tokens_per_second"], ".1f") for name in names]
        best = point["against_best"]
        ratios = [_text(best["output_tokens_per_second"], ".2f"), _text(point["speed_goal"], ".1f")]
        ratios += [_text(best["ttft_p50"], ".2f"), _text(point["first_token_goal"], ".1f")]
        errors = sum(sum(medians_of["errors"].values()) for medians_of in point["servers"].values())
        table.add_row(point["label"], str(point["num_clients"]), *speeds, *ratios, str(errors))
    console.print(table)
    for point in result["points"]:
        for name, medians_of in point["servers"].items():
            for error, count in medians_of["errors"].items():
                text = f"{name}, {point['label']}, {point['num_clients']} clients, {count} times: {error}"
                console.print(text, markup=False, highlight=False)
    for line in result.get("left_out", ()):
        console.print(f"left out: {line}", markup=False, highlight=False)


def _text(number: float | None, how: str) -> str:
    return "" if number is None else format(number, how)


@contextmanager
def make_plans(options: argparse.Namespace, console: Console) -> Iterator[list[ServerPlan]]:
    """The servers that the options name, ours first; a directory for vLLM is made where none is given."""
    plans = [octavo_plan(options.model, shlex.split(options.octavo_flags))]
    with TemporaryDirectory(prefix="octavo-peers-") as made:
        if options.llama_server is not None:
            gguf = resolve(options.model)
            plan = llama_plan(options.llama_server, gguf, NUM_SLOTS, shlex.split(options.llama_flags))
            plans.append(replace(plan, version=options.llama_version))
        if options.vllm is not None:
            directory = options.vllm_model
            if directory is None:
                console.print(f"writing {options.model} as a directory for vLLM", highlight=False)
                directory = write_checkpoint(resolve(options.model), Path(made))
            plans.append(vllm_plan(options.vllm, directory, NUM_SLOTS, shlex.split(options.vllm_flags)))
        yield plans


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Octavo beside llama.cpp's server and vLLM on the same loads.")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's llama-server, with its path")
    parser.add_argument("--llama-version", help="its version, for builds that were not told theirs")
    parser.add_argument("--vllm", type=Path, help="the vllm command in its own environment, with its path")
    parser.add_argument("--vllm-model", type=Path, help="directory of the model for vLLM (default: made from --model)")
    parser.add_argument("--model", default="smollm2", help="a known name or a .gguf file (default: smollm2)")
    for name in ("octavo", "llama", "vllm"):
        parser.add_argument(f"--{name}-flags", default="", help="more flags for this server, as one word")
    parser.add_argument("--rounds", type=int, help="rounds of every point (default: 1 to 5, fewer of long ones)")
    parser.add_argument("--minutes", type=float, default=25.0, help="after which no round is begun (default: 25)")
    parser.add_argument("--quick", action="store_true", help="three points, in a minute or two")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other prompts (default: 0)")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, help="folder for the result")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder for the page")
    parser.add_argument("--only-describe", action="store_true", help="write the page about the result that is there")
    return parser


def main() -> int:
    """Measure, print, and write the result and the page about it; 1 if a server or a request failed."""
    options = _parser().parse_args()
    console = Console(stderr=True)
    path = options.results / "peers.json"
    if not options.only_describe:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped on the way out
        deadline = time.monotonic() + options.minutes * 60
        points = QUICK_POINTS if options.quick else POINTS
        if options.rounds is not None:
            points = tuple(replace(point, num_rounds=options.rounds) for point in points)
        try:
            with make_plans(options, console) as plans:
                measured = measure(plans, points, options.seed, deadline, console)
        except (ModelStoreError, CheckpointNotWritten) as error:
            console.print(str(error), markup=False, highlight=False)
            return 1
        print_points(console, measured)
        head = {
            "question": "Octavo's output tokens per second and latencies beside those of llama.cpp's server and vLLM",
            "command": _shown(command_line()),
            "model": options.model,
            "unit": "seconds",
        }
        write_result(path, head | measured)
    result = json.loads(path.read_text(encoding="utf-8"))
    options.docs.mkdir(parents=True, exist_ok=True)
    write_whole(options.docs / "peers.md", report(result))
    console.print(f"Written: {path} and {options.docs / 'peers.md'}", highlight=False)
    return 1 if _went_wrong(result) else 0


def _went_wrong(result: dict[str, Any]) -> bool:
    """Whether a server or a request failed."""
    if any(server["error"] for server in result["servers"]):
        return True
    return any(medians_of["errors"] for point in result["points"] for medians_of in point["servers"].values())


def _shown(command: str) -> str:
    """The command without the folders of this machine."""
    return shlex.join(Path(word).name if word.startswith("/") else word for word in shlex.split(command))


if __name__ == "__main__":
    sys.exit(main())
