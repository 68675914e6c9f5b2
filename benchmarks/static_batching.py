"""Measured: the engine against a server of whole batches with contiguous caches, on the same model, kernels and memory.

The baseline is ours, and kinder than those of its kind: prompts are not padded, and an answer counts as complete when
its own last token is there. Both run on a clock that is the sum of what their steps took (measured_engine.py). Writes
benchmarks/results/static_batching.json.
"""

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS_DIR, command_line, machine_facts, write_result
from benchmarks.measured_engine import MeasuredModel, serve_measured
from benchmarks.paper_servers import Served
from benchmarks.paper_workloads import ALPACA, DATA_SETS, MAX_MODEL_LEN, NUM_SLOTS, SHAREGPT, DataSet, Job
from scheduler.config import SchedulerConfig
from scheduler.output import KnownRow, NewRow, SchedulerOutput
from scheduler.sampling_params import SamplingParams
from server.model_store import resolve

BLOCK_SIZE = 16
MAX_NUM_SEQS = 64  # the server's defaults on a CPU
MAX_NUM_BATCHED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Point:
    """One server at one rate of arrivals."""

    data_set: str
    server: str
    rate: float | None  # requests per second; None = all there at once
    num_requests: int
    normalised_latency: float  # mean seconds per generated token
    tokens_per_second: float
    mean_rows: float
    num_preemptions: int

    @classmethod
    def of(cls, data_set: str, server: str, rate: float | None, served: Served) -> "Point":
        """Sum up what a server did."""
        return cls(
            data_set=data_set,
            server=server,
            rate=rate,
            num_requests=len(served.latencies),
            normalised_latency=served.normalised_latency,
            tokens_per_second=served.tokens_per_second,
            mean_rows=served.mean_rows,
            num_preemptions=served.num_preemptions,
        )


def serve_in_batches(
    model: MeasuredModel, jobs: Sequence[Job], num_slots: int, advance: Callable[[int], None] = lambda _: None
) -> Served:
    """Run the requests that wait as one batch until the last of them has ended, then the next ones.

    A block of this cache holds the longest sequence there may be: each row's keys and values lie side by side. A row
    that has ended is computed on until its batch ends.
    """
    most_rows = num_slots // MAX_MODEL_LEN
    runner, _ = model.runner(MAX_MODEL_LEN, most_rows, most_rows)
    arriving = deque(zip(jobs, model.prompts(jobs, seed=0), strict=True))
    served = Served()
    now = 0.0
    next_seq_id = 0
    while arriving:
        now = max(now, arriving[0][0].arrival)
        batch: list[tuple[Job, tuple[int, ...]]] = []
        while arriving and arriving[0][0].arrival <= now and len(batch) < most_rows:
            batch.append(arriving.popleft())
        seq_ids = range(next_seq_id, next_seq_id + len(batch))
        next_seq_id += len(batch)
        for step in range(1, 1 + max(job.num_output_tokens for job, _ in batch)):
            output = _first_step(batch, seq_ids) if step == 1 else _later_step(batch, seq_ids, step)
            begin = time.perf_counter()
            runner.execute(output)
            seconds = time.perf_counter() - begin
            now += seconds
            served.busy_seconds += seconds
            served.row_seconds += seconds * len(batch)
            ended = [job for job, _ in batch if job.num_output_tokens == step]
            for job in ended:
                served.take(job, now)
            advance(len(ended))
        runner.execute(SchedulerOutput((), finished_seq_ids=tuple(seq_ids)))
    return served


def _first_step(batch: Sequence[tuple[Job, tuple[int, ...]]], seq_ids: range) -> SchedulerOutput:
    rows = []
    for block_id, ((job, prompt), seq_id) in enumerate(zip(batch, seq_ids, strict=True)):
        params = SamplingParams(max_tokens=job.num_output_tokens, temperature=0.0, ignore_eos=True)
        rows.append(NewRow(seq_id, 0, prompt, len(prompt), params, (block_id,), 0, len(prompt)))
    return SchedulerOutput(tuple(rows))


def _later_step(batch: Sequence[tuple[Job, tuple[int, ...]]], seq_ids: range, step: int) -> SchedulerOutput:
    lengths = (len(prompt) + step - 2 for _, prompt in batch)
    return SchedulerOutput(
        tuple(KnownRow(seq_id, (), None, length, 1) for seq_id, length in zip(seq_ids, lengths, strict=True))
    )


def compare(
    model: MeasuredModel,
    data_set: DataSet,
    rates: Sequence[float | None],
    num_requests: int,
    advance: Callable[[int], None] = lambda _: None,
) -> list[Point]:
    """Both servers at each rate, in turns, with the same requests."""
    config = SchedulerConfig(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, MAX_MODEL_LEN)
    points = []
    for rate in rates:
        jobs = data_set.jobs(num_requests, rate, seed=0)
        paged = serve_measured(model, jobs, config, NUM_SLOTS // BLOCK_SIZE, BLOCK_SIZE, advance=advance)
        static = serve_in_batches(model, jobs, NUM_SLOTS, advance)
        points.append(Point.of(data_set.name, "paged", rate, paged))
        points.append(Point.of(data_set.name, "static", rate, static))
    return points


def print_points(console: Console, points: Sequence[Point]) -> None:
    """One line per server and rate."""
    table = Table(
        *("lengths", "requests/s", "server", "s per token", "tokens/s", "rows", "preemptions"),
        title="Measured: the engine against static batches",
    )
    for point in points:
        table.add_row(
            point.data_set,
            "all at once" if point.rate is None else f"{point.rate:g}",
            point.server,
            f"{point.normalised_latency:.3f}",
            f"{point.tokens_per_second:.0f}",
            f"{point.mean_rows:.1f}",
            str(point.num_preemptions),
        )
    console.print(table)


def measure(model: MeasuredModel, scale: float, console: Console) -> list[Point]:
    """On two cores: more requests than static batches can take and fewer than the engine can, and all at once."""
    plan: list[tuple[DataSet, list[float | None], int]] = [
        (ALPACA, [2.0, None], max(2, round(40 * scale))),
        (SHAREGPT, [None], max(2, round(14 * scale))),
    ]
    points: list[Point] = []
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=sum(2 * len(rates) * count for _, rates, count in plan))
        for data_set, rates, count in plan:
            progress.update(task, description=f"measuring both servers, {data_set.name}")
            points += compare(model, data_set, rates, count, lambda ended: progress.advance(task, ended))
    return points


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description="The engine against a statically batched server, both measured.")
    parser.add_argument("--model", default="smollm2", help="a name, a .gguf file or a directory (default: smollm2)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests (default: 1)")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, help="folder for the result")
    options = parser.parse_args()
    console = Console(stderr=True)
    facts = machine_facts()
    model = MeasuredModel(resolve(options.model))
    points = measure(model, options.scale, console)
    print_points(console, points)
    result = {
        "question": "throughput and latency of the engine against whole batches with contiguous caches",
        "command": command_line(),
        "machine": facts,
        "model": model.name,
        "num_slots": NUM_SLOTS,
        "data_sets": [asdict(data_set) for data_set in DATA_SETS],
        "unit": "seconds",
        "points": [asdict(point) for point in points],
    }
    write_result(options.results / "static_batching.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
