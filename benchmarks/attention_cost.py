"""How near the native CPU attention comes to the processor's limits: decode and prefill, by context and cache type.

Every layer has a cache of its own, as in a model, in scattered blocks. Bare limits are torch's products of large
matrices and the reading of memory. Run it on a machine that does nothing else. Writes
benchmarks/results/attention_cost.json.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bare_limits import read_bandwidth
from benchmarks.machine import RESULTS_DIR, command_line, machine_facts, write_result
from kernels.attention.cpu import CpuBackend
from kernels.attention.metadata import AttentionParams, KVLayer
from kernels.kv_quant import QUANTISED_MAX
from tests.kernels.paged_batches import PagedBatch, Shape, make_batch, quantise_batch

BLOCK_SIZE = 16
BARE_SIZE = 1024  # of the square matrices whose product is the limit
TYPES = {  # of the query and the cache
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.bfloat16, torch.int8),
}


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention of a model."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences that are alike: their query tokens and all their tokens, the query's last among them."""

    num_sequences: int
    query_len: int
    seq_len: int

    @property
    def num_visible(self) -> int:
        """Pairs of a query token and a key that it sees."""
        hidden = self.query_len * (self.query_len - 1) // 2
        return self.num_sequences * (self.query_len * self.seq_len - hidden)


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """One case: all layers of one step."""

    model: str
    case: str
    types: str
    seconds: float
    flops_per_second: float  # two products of every query head with every key that it sees
    bytes_per_second: float  # of keys, values and their scales, each once


MODELS = {"SmolLM2-135M": Heads(30, 9, 3, 64), "Gemma 3 270M": Heads(18, 4, 1, 256)}
CASES = {
    **{f"decode 1 at {n}": Rows(1, 1, n) for n in (128, 512, 2048, 8192)},
    **{f"decode {n} at 300": Rows(n, 1, 300) for n in (8, 32)},
    "prefill 200": Rows(1, 200, 200),
    "prefill 512 at 1,400": Rows(1, 512, 1400),
    "prefill 512 at 8,192": Rows(1, 512, 8192),
}


def make_layers(heads: Heads, rows: Rows, types: tuple[torch.dtype, torch.dtype]) -> tuple[PagedBatch, list[KVLayer]]:
    """A batch, and as many caches of it as the model has layers."""
    query_dtype, cache_dtype = types
    shape = Shape(heads.num_q_heads, heads.num_kv_heads, heads.head_dim, BLOCK_SIZE)
    batch = make_batch(shape, [rows.query_len] * rows.num_sequences, [rows.seq_len] * rows.num_sequences)
    if cache_dtype in QUANTISED_MAX:
        batch, _ = quantise_batch(batch, cache_dtype)
    layer = batch.kv_layer
    tensors = (layer.key, layer.value, layer.key_scale, layer.value_scale)
    converted = [t if t is None or cache_dtype in QUANTISED_MAX else t.to(cache_dtype) for t in tensors]
    layers = [KVLayer(*(t if t is None else t.clone() for t in converted)) for _ in range(heads.num_layers)]
    return PagedBatch(batch.query.to(query_dtype), layers[0], batch.metadata), layers


def step_seconds(batch: PagedBatch, layers: Sequence[KVLayer], seconds: float) -> float:
    """The shortest time of attention in all layers, of passes that take so many seconds together."""
    backend = CpuBackend()
    params = AttentionParams(batch.query.shape[2] ** -0.5)
    found: list[float] = []
    while len(found) < 3 or sum(found) < seconds:
        begin = time.perf_counter()
        for layer in layers:
            backend.attend(batch.query, layer, batch.metadata, params)
        found.append(time.perf_counter() - begin)
    return min(found)


def measure(model: str, case: str, types: str, seconds: float) -> AttentionCost:
    """Time one case."""
    heads, rows = MODELS[model], CASES[case]
    batch, layers = make_layers(heads, rows, TYPES[types])
    best = step_seconds(batch, layers, seconds)
    flops = 4 * heads.num_layers * heads.num_q_heads * heads.head_dim * rows.num_visible
    item = TYPES[types][1].itemsize
    bytes_per_head = heads.head_dim * item + (4 if item == 1 else 0)
    num_bytes = 2 * heads.num_layers * heads.num_kv_heads * rows.num_sequences * rows.seq_len * bytes_per_head
    return AttentionCost(model, case, types, best, flops / best, num_bytes / best)


def product_rate(dtype: torch.dtype, rounds: int = 5) -> float:
    """Floating-point operations per second of torch's own product of large matrices; the best of several."""
    a, b = torch.randn(2, BARE_SIZE, BARE_SIZE).to(dtype)
    found = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        torch.mm(a, b)
        found.append(time.perf_counter() - begin)
    return 2 * BARE_SIZE**3 / min(found)


def print_costs(
    console: Console, costs: Sequence[AttentionCost], limits: Mapping[str, float], bandwidth: float
) -> None:
    """One line per case: milliseconds, and the shares of both limits."""
    table = Table("model", "case", "cache", "ms", "GFLOP/s", "of product", "GB/s", "of reading")
    for column in table.columns[3:]:
        column.justify = "right"
    for cost in costs:
        table.add_row(
            cost.model,
            cost.case,
            cost.types,
            f"{cost.seconds * 1e3:.3f}",
            f"{cost.flops_per_second / 1e9:,.0f}",
            f"{cost.flops_per_second / limits[cost.types]:.0%}",
            f"{cost.bytes_per_second / 1e9:.1f}",
            f"{cost.bytes_per_second / bandwidth:.0%}",
        )
    console.print(table)


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description="Native CPU attention against the processor's limits.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads (default: torch's own)")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each case (default: 0.5)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES), help="of the cache")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, help="folder for the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    facts = machine_facts()
    limits = {types: product_rate(query_dtype) for types, (query_dtype, _) in TYPES.items()}
    bandwidth = read_bandwidth(options.threads, 3)
    costs = [
        measure(model, case, types, options.seconds)
        for model in options.models
        for types in options.types
        for case in options.cases
    ]
    print_costs(Console(stderr=True), costs, limits, bandwidth)
    result = {
        "question": "how near native CPU attention comes to the processor's products and its reading of memory",
        "command": command_line(),
        "machine": facts,
        "instruction_set": CpuBackend().instruction_set,
        "threads": options.threads,
        "product_flops_per_second": limits,
        "read_bytes_per_second": bandwidth,
        "costs": [asdict(cost) for cost in costs],
    }
    write_result(options.results / "attention_cost.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
