"""Redoes the PagedAttention paper's figures (Kwon et al., SOSP 2023) on this engine. `make paper` runs it.

Memory, batch sizes, throughput, block sizes and preemption are simulated with the real scheduler and block manager, on
a roofline of the paper's card and on steps measured on this machine; sharing by beams, attention, swapping and the
comparison with static batches are measured on a real model. Writes benchmarks/results/paper.json, paper_*.png beside
it, and docs/paper.md.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import paper_blocks, paper_figures, paper_sharing, static_batching
from benchmarks.machine import RESULTS_DIR, ROOT, command_line, machine_facts, write_result, write_whole
from benchmarks.measured_engine import MeasuredModel
from benchmarks.paper_report import report
from benchmarks.paper_workloads import ALPACA, DATA_SETS, NUM_SLOTS, SHAREGPT
from scheduler.simulate.step_cost import FittedCost, load_fitted_cost
from server.model_store import resolve

COST_MODEL = RESULTS_DIR / "step_cost_model.json"
CONTEXTS = {SHAREGPT.name: 330, ALPACA.name: 48}  # tokens before a decode: the prompt and half the answer
NUM_SEARCHED = {SHAREGPT.name: 4, ALPACA.name: 8}  # prompts of each beam width
RESTORED_TOKENS = 512
RESTORED_BLOCK_SIZES = (1, 4, 16, 64, 256)
Outcome = TypeVar("Outcome")
_LOAD = 0.95  # of our engine's capacity, where sizes of blocks are compared


class _Parts:
    """Runs one part of the work after another, each with a progress bar and its seconds in the result."""

    def __init__(self, console: Console) -> None:
        self.seconds: dict[str, float] = {}
        self._console = console

    def run(self, name: str, total: int, work: Callable[[Callable[[int], None]], Outcome]) -> Outcome:
        begin = time.perf_counter()
        with Progress(console=self._console, disable=not self._console.is_terminal) as progress:
            task = progress.add_task(name, total=total)
            outcome = work(lambda done: progress.advance(task, done))
        self.seconds[name] = round(time.perf_counter() - begin, 1)
        self._console.print(f"{name}: {self.seconds[name]:.0f} s", highlight=False)
        return outcome


def simulate(cost: FittedCost, parts: _Parts) -> dict[str, Any]:
    """Memory and throughput of all servers."""
    settings = (paper_figures.paper_setting(), paper_figures.measured_setting(cost))
    num_runs = len(DATA_SETS) * len(paper_figures.SERVERS)
    memory = parts.run("memory", num_runs, lambda advance: paper_figures.memory_use(settings[0], advance))
    throughput = [
        result
        for setting in settings
        for result in parts.run(
            f"throughput, {setting.name}",
            num_runs,
            lambda advance, setting=setting: paper_figures.throughputs(setting, advance),
        )
    ]
    return {"memory": [asdict(use) for use in memory], "throughput": [asdict(result) for result in throughput]}


def measure(model: MeasuredModel, scale: float, parts: _Parts, console: Console) -> dict[str, Any]:
    """What needs the model."""
    num_rounds = max(3, round(15 * scale))
    attention = parts.run(
        "attention",
        num_rounds,
        lambda advance: paper_blocks.measure_attention(model, tuple(CONTEXTS.values()), num_rounds, advance),
    )
    restoring = parts.run(
        "restoring",
        len(paper_blocks.BLOCK_SIZES),
        lambda advance: paper_blocks.measure_restoring(model, RESTORED_TOKENS, max(2, round(3 * scale)), advance),
    )
    searched = {name: max(2, round(count * scale)) for name, count in NUM_SEARCHED.items()}
    sharing = parts.run(
        "sharing",
        len(paper_sharing.WIDTHS) * sum(searched.values()),
        lambda advance: paper_sharing.sharing_savings(model, searched, advance),
    )
    begin = time.perf_counter()
    points = static_batching.measure(model, scale, console)
    parts.seconds["static batches"] = round(time.perf_counter() - begin, 1)
    return {
        "attention": [asdict(each) for each in attention],
        "restoring": [asdict(each) for each in restoring],
        "sharing": [asdict(each) for each in sharing],
        "measured": [asdict(each) for each in points],
    }


def combine(cost: FittedCost, result: dict[str, Any], parts: _Parts) -> dict[str, Any]:
    """Simulations that need what was measured."""
    setting = paper_figures.measured_setting(cost)
    seconds = {(each["context"], each["block_size"]): each["seconds"] for each in result["attention"]}

    def attention(data_set: str, size: int) -> float:
        context = CONTEXTS[data_set]
        return float(seconds[context, size] / seconds[context, paper_figures.BLOCK_SIZE])

    rates = {
        each["data_set"]: _LOAD * each["rate"]
        for each in result["throughput"]
        if each["setting"] == setting.name and each["server"] == "paged"
    }
    sizes = parts.run(
        "block sizes",
        len(DATA_SETS) * len(paper_blocks.BLOCK_SIZES),
        lambda advance: paper_figures.block_sizes(
            paper_figures.paper_setting(), setting, rates, attention, paper_blocks.BLOCK_SIZES, advance
        ),
    )
    preemptions = parts.run(
        "preemption", 2 * len(RESTORED_BLOCK_SIZES), lambda advance: _preemptions(cost, result, advance)
    )
    measured = [{**point, "simulated_latency": _simulated_latency(setting, point)} for point in result["measured"]]
    return {"block_sizes": [asdict(each) for each in sizes], "preemption": preemptions, "measured": measured}


def _simulated_latency(setting: paper_figures.Setting, point: Mapping[str, Any]) -> float:
    """What the simulation says of a run that was measured: how far it can be trusted."""
    (data_set,) = [each for each in DATA_SETS if each.name == point["data_set"]]
    jobs = data_set.jobs(point["num_requests"], point["rate"], seed=0)
    return setting.server(point["server"])(jobs).normalised_latency


def _preemptions(cost: FittedCost, result: dict[str, Any], advance: Callable[[int], None]) -> list[dict[str, Any]]:
    """Both settings: this machine with its measured times, the paper's card with those of its data sheet."""
    times = {each["block_size"]: each for each in result["restoring"]}
    results = []
    for size in RESTORED_BLOCK_SIZES:
        num_blocks = RESTORED_TOKENS // size
        swap = (times[size]["swap_out"] + times[size]["swap_in"]) / 2 / num_blocks
        recompute = times[size]["recompute"] / RESTORED_TOKENS
        measured = paper_figures.measured_setting(replace(cost, per_swapped_block=swap))
        results += paper_figures.preemption(measured, size, recompute, swap)
        advance(1)
        sheet = paper_figures.RooflineCost(paper_figures.PAPER_CARD, paper_figures.PAPER_MODEL, size)
        paper = replace(paper_figures.paper_setting(), cost=sheet)
        results += paper_figures.preemption(
            paper, size, sheet.seconds_per_prefill_token, sheet.seconds_per_swapped_block
        )
        advance(1)
    return [asdict(each) for each in results]


def main() -> int:
    """Simulate, measure, and write the result, its plots and the page about it."""
    parser = argparse.ArgumentParser(description="The PagedAttention paper's figures on this engine.")
    parser.add_argument("--model", default="smollm2", help="a name, a .gguf file or a directory (default: smollm2)")
    parser.add_argument("--cost-model", type=Path, default=COST_MODEL, help="of benchmarks/step_cost_model.py")
    parser.add_argument("--scale", type=float, default=1.0, help="of what is measured (default: 1)")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, help="folder for the result and the plots")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder for the page")
    parser.add_argument("--only-draw", action="store_true", help="draw and describe the result that is there")
    options = parser.parse_args()
    console = Console(stderr=True)
    try:
        from benchmarks.paper_plots import plot_all
    except ImportError as error:
        console.print(f"{error}. The plots need the extra `bench`: pip install -e '.\\[bench]'")
        return 1
    path = options.results / "paper.json"
    if options.only_draw:
        result = json.loads(path.read_text(encoding="utf-8"))
    else:
        try:
            cost = load_fitted_cost(options.cost_model)
        except ValueError as error:
            console.print(f"{error} Run benchmarks/step_cost_model.py first.", markup=False)
            return 1
        result = _everything(cost, options, console)
        write_result(path, result)
    plot_all(result, options.results)
    options.docs.mkdir(parents=True, exist_ok=True)
    write_whole(options.docs / "paper.md", report(result))
    console.print(f"Written: {path}, its plots and {options.docs / 'paper.md'}", highlight=False)
    return 0


def _everything(cost: FittedCost, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    facts = machine_facts()
    parts = _Parts(console)
    model = MeasuredModel(resolve(options.model))
    result: dict[str, Any] = {
        "question": "the figures of the PagedAttention paper on this engine",
        "command": command_line(),
        "machine": facts,
        "model": model.name,
        "attention_backend": model.backend.name,
        "num_slots": NUM_SLOTS,
        "data_sets": [asdict(data_set) for data_set in DATA_SETS],
        "paper_setting": paper_figures.paper_setting().cost.describe(),
        "cost_model": cost.to_json(),
        "unit": "seconds",
    }
    result |= simulate(cost, parts)
    result |= measure(model, options.scale, parts, console)
    result |= combine(cost, result, parts)
    result["part_seconds"] = parts.seconds
    return result


if __name__ == "__main__":
    sys.exit(main())
