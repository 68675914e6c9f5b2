"""Which of a peer's settings is the fastest on this machine: what peers.py starts it with is chosen by this.

Runs a few loads of peers.py on one peer with one setting after another, in turns; all are loaded at once, which takes
up to 15 GB. Writes benchmarks/results/peer_settings.json, to which a run for the other peer is added.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS_DIR, machine_facts, write_result
from benchmarks.peer_loads import Point
from benchmarks.peer_ratios import medians, of_server
from benchmarks.peer_servers import ServerPlan, llama_plan, loaded_server, vllm_plan
from benchmarks.peers import NUM_SLOTS, Measurement
from server.model_store import resolve

POINTS = (
    Point("completions", 128, 64, 1, num_jobs=3, num_rounds=1),
    Point("completions", 128, 64, 8, num_jobs=8, num_rounds=1),
    Point("completions", 128, 64, 32, num_jobs=32, num_rounds=1),
    Point("completions", 1024, 64, 8, num_jobs=8, num_rounds=1),
)
# By the words that say how it differs from what peers.py starts.
LLAMA_SETTINGS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "as it is": ((), {}),
    "one cache for all slots": (("--kv-unified",), {}),
    "no flash attention": (("--flash-attn", "off"), {}),
    "one cache for all slots, no flash attention": (("--kv-unified", "--flash-attn", "off"), {}),
    "threads that sleep at barriers": ((), {"OMP_WAIT_POLICY": "passive"}),
}
VLLM_SETTINGS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "bfloat16": (("--dtype", "bfloat16"), {}),
    "float32": (("--dtype", "float32"), {}),
    "bfloat16, a core left free": (("--dtype", "bfloat16"), {"VLLM_CPU_OMP_THREADS_BIND": "auto"}),
}


def measure(plans: Sequence[ServerPlan], seed: int, console: Console) -> list[dict[str, Any]]:
    """Medians of every setting at every point. Raises ServerDidNotStart."""
    with ExitStack() as stack:
        loaded = []
        for plan in plans:
            server = stack.enter_context(loaded_server(plan))
            server.end_turn()
            loaded.append(server)
            console.print(f"{plan.name}: ready after {server.start_seconds:.1f} s", highlight=False)
        results = uvloop.run(Measurement(loaded, POINTS, seed, console).run(time.monotonic() + 3600))
    return [
        {
            "label": result.point.label,
            "num_clients": result.point.num_clients,
            "settings": {plan.name: medians(of_server(result, plan.name)) for plan in plans},
        }
        for result in results
    ]


def print_points(console: Console, title: str, points: Sequence[dict[str, Any]]) -> None:
    """A line for each load and setting."""
    table = Table(title=title)
    for column in ("load", "clients", "setting", "output tokens/s", "TTFT p50, ms", "errors"):
        table.add_column(column, justify="left" if column in ("load", "setting") else "right")
    for point in points:
        for setting, found in point["settings"].items():
            speed, first = found["output_tokens_per_second"], found["ttft_p50"]
            cells = ["", ""] if speed is None else [f"{speed:.1f}", f"{first * 1e3:.0f}"]
            errors = str(sum(found["errors"].values()))
            table.add_row(point["label"], str(point["num_clients"]), setting, *cells, errors)
    console.print(table)


def main() -> int:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description="The settings with which a peer is the fastest on this machine.")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's llama-server, with its path")
    parser.add_argument("--vllm", type=Path, help="the vllm command in its own environment, with its path")
    parser.add_argument("--vllm-model", type=Path, help="directory of the model for vLLM; needed with --vllm")
    parser.add_argument("--model", default="smollm2", help="a known name or a .gguf file (default: smollm2)")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other prompts (default: 0)")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, help="folder for the result")
    options = parser.parse_args()
    if options.vllm is not None and options.vllm_model is None:
        parser.error("--vllm needs --vllm-model")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped on the way out
    console = Console(stderr=True)
    path = options.results / "peer_settings.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, plans in _plans(options).items():
        facts = machine_facts()
        points = measure(plans, options.seed, console)
        print_points(console, name, points)
        commands = {plan.name: plan.shown_command for plan in plans}
        result[name] = {"machine": facts, "commands": commands, "unit": "seconds", "points": points}
        write_result(path, result)
    return 0


def _plans(options: argparse.Namespace) -> dict[str, list[ServerPlan]]:
    plans: dict[str, list[ServerPlan]] = {}
    if options.llama_server is not None:
        gguf = resolve(options.model)
        plans["llama.cpp"] = [
            _as_setting(llama_plan(options.llama_server, gguf, NUM_SLOTS, flags), setting, environment)
            for setting, (flags, environment) in LLAMA_SETTINGS.items()
        ]
    if options.vllm is not None:
        plans["vllm"] = [
            _as_setting(vllm_plan(options.vllm, options.vllm_model, NUM_SLOTS, flags), setting, environment)
            for setting, (flags, environment) in VLLM_SETTINGS.items()
        ]
    return plans


def _as_setting(plan: ServerPlan, setting: str, environment: dict[str, str]) -> ServerPlan:
    return replace(plan, name=setting, environment={**plan.environment, **environment})


if __name__ == "__main__":
    sys.exit(main())
