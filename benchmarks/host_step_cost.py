"""What the host does for one decode step: schedule, build the inputs and launch, read the result, update.

A stand-in for the model takes no time, so that nothing but the host's own work is measured. Runs anywhere; writes
benchmarks/results/host_step_cost.json.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS_DIR, command_line, machine_facts, write_result
from kernels.sampling.sampling_batch import SamplingBatch
from models.forward_batch import ForwardBatch
from models.runner import ModelRunner
from paged_cache.kv_cache import KVCache
from paged_cache.manager import BlockManager
from paged_cache.spec import KVCacheSpec
from scheduler.config import SchedulerConfig
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class StepCost:
    """Median seconds of the parts of a decode step."""

    num_sequences: int
    context: int  # tokens of each sequence as the first step begins
    num_steps: int
    schedule: float
    launch: float  # inputs and rows; the model is a stand-in
    result: float
    update: float
    total: float


class NoModel:
    """Takes the place of a decoder: zeros at once, and token 0 for everyone."""

    device = torch.device("cpu")
    config = SimpleNamespace(vocab_size=1, eos_token_ids=())

    def __init__(self, most_tokens: int) -> None:
        """Prepare the zeros."""
        self._hidden = torch.zeros(most_tokens, 1)
        self.ops = SimpleNamespace(sample=self._sample)

    def __call__(self, batch: ForwardBatch, *_: Any) -> torch.Tensor:  # noqa: ANN401  # backend and cache, unused
        """Hidden states of the batch's tokens."""
        return self._hidden[: len(batch.input_ids)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """One number per row will do."""
        return hidden

    def _sample(self, logits: torch.Tensor, _: SamplingBatch) -> torch.Tensor:
        return torch.zeros(len(logits), dtype=torch.int64)


def measure(num_sequences: int, context: int, num_steps: int) -> StepCost:
    """Decode `num_sequences` at once, all with `context` tokens at first."""
    max_model_len = context + num_steps + BLOCK_SIZE
    num_blocks = num_sequences * -(-max_model_len // BLOCK_SIZE)
    limits = {"max_num_seqs": num_sequences, "max_model_len": max_model_len}
    scheduler = Scheduler(
        SchedulerConfig(**limits, max_num_batched_tokens=num_sequences * context),
        BlockManager(num_blocks, BLOCK_SIZE),
    )
    kv_cache = KVCache(KVCacheSpec(1, 1, 1, BLOCK_SIZE, "float32"), num_blocks, NoModel.device)
    runner = ModelRunner(NoModel(num_sequences * context), None, kv_cache, **limits)
    params = SamplingParams(max_tokens=num_steps + 1, temperature=0.7, top_p=0.9, ignore_eos=True)
    for number in range(num_sequences):
        scheduler.add(Request(str(number), (1,) * context, params, arrival_time=float(number)))
    output = scheduler.schedule()
    scheduler.update(output, runner.execute(output))
    parts = []
    while scheduler.has_unfinished:
        times = [time.perf_counter()]
        output = scheduler.schedule()
        times.append(time.perf_counter())
        pending = runner.launch(output)
        times.append(time.perf_counter())
        result = pending.result()
        times.append(time.perf_counter())
        scheduler.update(output, result)
        times.append(time.perf_counter())
        parts.append([*(later - earlier for earlier, later in pairwise(times)), times[-1] - times[0]])
    return StepCost(num_sequences, context, len(parts), *(median(column) for column in zip(*parts, strict=True)))


def print_costs(console: Console, costs: Sequence[StepCost]) -> None:
    """One line per number of sequences."""
    names = ("schedule", "launch", "result", "update", "total")
    table = Table("sequences", *(f"{name}, ms" for name in names), title="The host's time for one decode step, medians")
    for column in table.columns:
        column.justify = "right"
    for cost in costs:
        table.add_row(str(cost.num_sequences), *(f"{getattr(cost, name) * 1e3:.3f}" for name in names))
    console.print(table)


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description="The host's time for one decode step, without the model.")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256], help="how many decode at once")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence (default: 1024)")
    parser.add_argument("--steps", type=int, default=300, help="decode steps that are timed (default: 300)")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, help="folder for the result")
    options = parser.parse_args()
    torch.set_num_threads(1)  # nothing here is large enough to be shared out
    facts = machine_facts()
    costs = [measure(number, options.context, options.steps) for number in options.sequences]
    print_costs(Console(stderr=True), costs)
    result = {
        "question": "the host's time for one decode step: schedule, build the inputs, read the result, update",
        "command": command_line(),
        "machine": facts,
        "block_size": BLOCK_SIZE,
        "unit": "seconds",
        "costs": [asdict(cost) for cost in costs],
    }
    write_result(options.results / "host_step_cost.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
