"""What it costs to choose and rank tokens on a CPU: the native sampler against the one in torch, per row of logits.

Runs anywhere the native library is built; writes benchmarks/results/sampler_cost.json.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS_DIR, command_line, machine_facts, write_result
from kernels.model_ops.native_ops import NativeOps
from kernels.model_ops.ops import ModelOps
from kernels.model_ops.torch_ops import TorchOps
from kernels.sampling.sampling_batch import SamplingBatch

# temperature, top_k, top_p, min_p
SETTINGS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature 1": (1.0, 0, 1.0, 0.0),
    "top_k 50": (1.0, 50, 1.0, 0.0),
    "top_p 0.9": (1.0, 0, 0.9, 0.0),
    "min_p 0.05": (1.0, 0, 1.0, 0.05),
    "top_k 40, top_p 0.95": (0.7, 40, 0.95, 0.0),
}
LOGPROBS = {"log-probability of one token": 0, "and of the 20 best": 20}
LOGIT_SPREAD = 2.5  # standard deviation: with top_p 0.9 some thousand tokens are kept, more than most models leave


@dataclass(frozen=True, slots=True)
class RowCost:
    """Median seconds of one row."""

    operation: str
    num_rows: int
    native: float
    torch: float


def measure(num_rows: int, vocab_size: int, rounds: int) -> list[RowCost]:
    """Every operation on `num_rows` rows at once, the two samplers in turns."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * LOGIT_SPREAD
    token_ids = logits.argmax(dim=-1)
    uniform = torch.rand(num_rows, dtype=torch.float64, generator=generator)
    operations: dict[str, Callable[[ModelOps], object]] = {}
    for name, (temperature, top_k, top_p, min_p) in SETTINGS.items():
        columns = (temperature, top_k, top_p, min_p)
        batch = SamplingBatch(*(torch.full((num_rows,), value) for value in columns), uniform, temperature == 0)
        operations[name] = lambda ops, batch=batch: ops.sample(logits, batch)
    for name, num_top in LOGPROBS.items():
        operations[name] = lambda ops, num_top=num_top: ops.token_logprobs(logits, token_ids, num_top)
    both: tuple[ModelOps, ModelOps] = (NativeOps(), TorchOps())
    return [
        RowCost(name, num_rows, *(seconds / num_rows for seconds in _medians(operation, both, rounds)))
        for name, operation in operations.items()
    ]


def _medians(operation: Callable[[ModelOps], object], both: Sequence[ModelOps], rounds: int) -> list[float]:
    """Seconds of one call with each of the operations, after one call that is not timed."""
    times: list[list[float]] = [[] for _ in both]
    for _ in range(rounds + 1):
        for ops, taken in zip(both, times, strict=True):
            start = time.perf_counter()
            operation(ops)
            taken.append(time.perf_counter() - start)
    return [median(taken[1:]) for taken in times]


def print_costs(console: Console, costs: Sequence[RowCost]) -> None:
    """One line per operation and number of rows."""
    table = Table(
        "operation", "rows", "native, µs a row", "torch, µs a row", "ratio", title="Choosing a token, medians"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for cost in costs:
        columns = (f"{cost.native * 1e6:.1f}", f"{cost.torch * 1e6:.1f}", f"{cost.torch / cost.native:.1f}")
        table.add_row(cost.operation, str(cost.num_rows), *columns)
    console.print(table)


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description="Choosing and ranking tokens: the native sampler against torch.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="rows at once (default: 1 8 32)")
    parser.add_argument("--vocab-size", type=int, default=49152, help="tokens of a row (default: 49152)")
    parser.add_argument("--rounds", type=int, default=15, help="calls that are timed (default: 15)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads (default: torch's)")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, help="folder for the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    costs = [cost for rows in options.rows for cost in measure(rows, options.vocab_size, options.rounds)]
    print_costs(Console(stderr=True), costs)
    result = {
        "question": "the time to choose and to rank the tokens of one row of logits, natively and in torch",
        "command": command_line(),
        "machine": machine_facts(),
        "vocab_size": options.vocab_size,
        "threads": options.threads,
        "unit": "seconds",
        "costs": [asdict(cost) for cost in costs],
    }
    write_result(options.results / "sampler_cost.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
