"""What one step costs the scheduler and the block manager: microseconds per running sequence, with a long queue behind.

No model and no torch: `schedule` and `update` alone, over sequences that decode, in processor time, so that what else
the machine does is not counted. Writes benchmarks/results/scheduler_cost.json.
"""

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS_DIR, command_line, machine_facts, write_result
from paged_cache.manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.output import RowResult, StepResult
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
STEP_SECONDS = 0.03  # by which the clock that the scheduler is told moves on
_SAMPLED = RowResult((1,))


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one decode step. A step in sixteen also hashes and registers every sequence's full block."""

    num_running: int
    num_waiting: int
    num_tenants: int
    num_steps: int
    schedule: float  # median
    update: float  # median
    total: float  # median
    mean: float  # of the total
    most: float  # of the total

    @property
    def microseconds_per_sequence(self) -> float:
        """Of the mean step, so that hashing counts with its share."""
        return 1e6 * self.mean / self.num_running


def measure(num_running: int, num_waiting: int, num_tenants: int, context: int, num_steps: int) -> StepCost:
    """Decode `num_running` sequences that start with `context` tokens, while others wait for one of them to end."""
    max_model_len = context + num_steps + BLOCK_SIZE
    config = SchedulerConfig(
        max_num_seqs=num_running, max_num_batched_tokens=num_running * context, max_model_len=max_model_len
    )
    # With no block to spare the ones that wait are looked at in each step, as under load.
    scheduler = Scheduler(config, BlockManager(num_running * -(-max_model_len // BLOCK_SIZE), BLOCK_SIZE))
    params = SamplingParams(max_tokens=num_steps + 1, ignore_eos=True)
    for number in range(num_running + num_waiting):
        tenant = f"tenant {number % num_tenants}"
        prompt = (number, *range(context - 1))  # nothing is shared
        scheduler.add(Request(str(number), prompt, params, arrival_time=0.0, tenant=tenant), 0.0)
    output = scheduler.schedule(0.0)
    assert len(output.rows) == num_running, f"{len(output.rows)} of {num_running} sequences run"
    scheduler.update(output, StepResult((_SAMPLED,) * num_running), 0.0)
    parts = []
    gc.collect()
    gc.freeze()  # the prompts that wait are no work of the step's
    for step in range(1, num_steps):
        begin = time.thread_time()
        output = scheduler.schedule(step * STEP_SECONDS)
        middle = time.thread_time()
        result = StepResult((_SAMPLED,) * len(output.rows))
        after = time.thread_time()
        scheduler.update(output, result, step * STEP_SECONDS)
        end = time.thread_time()
        parts.append((middle - begin, end - after, middle - begin + end - after))
    gc.unfreeze()
    schedule, update, total = zip(*parts, strict=True)
    return StepCost(
        num_running=num_running,
        num_waiting=num_waiting,
        num_tenants=num_tenants,
        num_steps=len(parts),
        schedule=median(schedule),
        update=median(update),
        total=median(total),
        mean=fmean(total),
        most=max(total),
    )


def print_costs(console: Console, costs: Sequence[StepCost]) -> None:
    """One line per load."""
    table = Table(
        *("running", "waiting", "tenants", "schedule, ms", "update, ms", "step, ms", "worst, ms", "us per sequence"),
        title="The scheduler's time for one decode step (medians; us per sequence of the mean)",
    )
    for column in table.columns:
        column.justify = "right"
    for cost in costs:
        table.add_row(
            f"{cost.num_running:,}",
            f"{cost.num_waiting:,}",
            str(cost.num_tenants),
            *(f"{seconds * 1e3:.3f}" for seconds in (cost.schedule, cost.update, cost.total, cost.most)),
            f"{cost.microseconds_per_sequence:.2f}",
        )
    console.print(table)


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description="The scheduler's time for one step, without any model.")
    parser.add_argument("--running", type=int, nargs="+", default=[16, 256, 2048], help="sequences that decode")
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10_000], help="requests that wait meanwhile")
    parser.add_argument("--tenants", type=int, default=10, help="whose requests they are (default: 10)")
    parser.add_argument("--context", type=int, default=256, help="tokens of each at first (default: 256)")
    parser.add_argument("--steps", type=int, default=160, help="decode steps that are timed (default: 160)")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, help="folder for the result")
    options = parser.parse_args()
    facts = machine_facts()
    costs = [
        measure(running, waiting, options.tenants, options.context, options.steps)
        for running in options.running
        for waiting in options.waiting
    ]
    print_costs(Console(stderr=True), costs)
    result = {
        "question": "what one decode step costs the scheduler, by running and waiting sequences",
        "command": command_line(),
        "machine": facts,
        "block_size": BLOCK_SIZE,
        "context": options.context,
        "unit": "seconds",
        "costs": [{**asdict(cost), "microseconds_per_sequence": cost.microseconds_per_sequence} for cost in costs],
    }
    write_result(options.results / "scheduler_cost.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
