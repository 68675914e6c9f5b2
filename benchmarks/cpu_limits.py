"""How near the engine comes to what the processor can do: matrix products, prefill, decoding, and what the rest takes.

Bare limits are those of torch's own int8 and float32 products at the model's shapes, and of reading memory. Run it on a
machine that does nothing else. Writes benchmarks/results/cpu_limits.json.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bare_limits import (
    ProductShape,
    Way,
    bare_ways,
    own_ways,
    product_seconds,
    product_shapes,
    read_bandwidth,
)
from benchmarks.machine import RESULTS_DIR, command_line, machine_facts, write_result
from benchmarks.served_model import ServedModel
from benchmarks.step_parts import StepParts, StepShape, layer_products, measure_parts, weight_bytes
from server.model_store import resolve
from server.tokenizer import load_tokenizer
from tests import data_files

PREFILL = 512  # tokens of a step, the server's own budget
ROWS = (1, 4, 16, 64, 256, PREFILL)
MOST_HEAD_ROWS = 64  # no step samples more
STEPS = {
    "decode, 1 sequence": StepShape(1, 256, 1),
    "decode, 8 sequences": StepShape(8, 256, 1),
    "decode, 32 sequences": StepShape(32, 256, 1),
    "prefill, 512 tokens": StepShape(1, PREFILL, PREFILL),
}
HEAD = "head"


@dataclass(frozen=True, slots=True)
class Shares:
    """The two that matter: how much of the machine's own limits arrives end to end."""

    prefill_tokens_per_second: float
    prefill_operations_per_second: float  # of the products alone, over the whole step
    bare_operations_per_second: float  # of the fastest int8 product without our code, at the same shapes and rows
    prefill_share: float  # of these
    decode_bytes_per_second: float  # of weights and KV cache, over the whole step
    read_bytes_per_second: float  # of memory, without our code
    decode_share: float  # of these


def layers_seconds(
    found: Mapping[str, Mapping[str, Mapping[int, float]]], shapes: Sequence[ProductShape], way: str, num_rows: int
) -> float:
    """Seconds of all products of the layers, from those of one product of each shape: found[shape][way][rows]."""
    return sum(shape.count * found[shape.name][way][num_rows] for shape in shapes if shape.name != HEAD)


def shares_of(
    parts: Mapping[str, StepParts],
    shapes: Sequence[ProductShape],
    bare_seconds: float,
    bytes_per_step: int,
    bandwidth: float,
) -> Shares:
    """Hold the prefill of 512 tokens and the decoding of one sequence against the limits.

    Args:
        parts: of the steps, by the names in STEPS.
        shapes: of the products.
        bare_seconds: of the layers' products at 512 rows, by the fastest bare way.
        bytes_per_step: that decoding one sequence reads.
        bandwidth: bytes per second.
    """
    prefill, decode = parts["prefill, 512 tokens"].step, parts["decode, 1 sequence"].step
    operations = 2 * PREFILL * sum(shape.num_weights for shape in shapes if shape.name != HEAD)
    return Shares(
        prefill_tokens_per_second=PREFILL / prefill,
        prefill_operations_per_second=operations / prefill,
        bare_operations_per_second=operations / bare_seconds,
        prefill_share=bare_seconds / prefill,
        decode_bytes_per_second=bytes_per_step / decode,
        read_bytes_per_second=bandwidth,
        decode_share=bytes_per_step / decode / bandwidth,
    )


def bytes_per_step(model: ServedModel, context: int) -> int:
    """What decoding one sequence reads at least: every weight once, and the keys and values of its context."""
    info = model.info
    weights = sum(weight_bytes(linear) for linear in (*layer_products(model), model.decoder.head))
    return weights + context * info.kv_cache_bytes // (info.num_blocks * info.block_size)


def print_products(
    console: Console,
    found: Mapping[str, Mapping[str, Mapping[int, float]]],
    shapes: Sequence[ProductShape],
    ways: Sequence[Way],
) -> None:
    """One line per number of rows: milliseconds and rates of the layers' products; then the head's."""
    weights = sum(shape.num_weights for shape in shapes if shape.name != HEAD)
    table = Table("rows", *(way.name for way in ways), title="All products of the layers: ms, and GOP/s")
    for num_rows in ROWS:
        seconds = [layers_seconds(found, shapes, way.name, num_rows) for way in ways]
        table.add_row(str(num_rows), *(f"{s * 1e3:.1f}, {2e-9 * num_rows * weights / s:,.0f}" for s in seconds))
    console.print(table)
    table = Table("rows", *(way.name for way in ways), title="The head: ms")
    for num_rows in found[HEAD][ways[0].name]:
        table.add_row(str(num_rows), *(f"{found[HEAD][way.name][num_rows] * 1e3:.2f}" for way in ways))
    console.print(table)


def print_parts(console: Console, parts: Mapping[str, StepParts]) -> None:
    """One line per part, one column per kind of step."""
    table = Table("ms", *parts, title="Steps and their parts")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {"whole step": [of_step.step for of_step in parts.values()]}
    for name in next(iter(parts.values())).parts:
        rows[name] = [of_step.parts[name] for of_step in parts.values()]
    rows["rest"] = [of_step.rest for of_step in parts.values()]
    for name, seconds in rows.items():
        table.add_row(name, *(f"{s * 1e3:.3f}" for s in seconds))
    console.print(table)


def print_shares(console: Console, shares: Shares) -> None:
    """Two sentences."""
    console.print(
        f"Prefill: {shares.prefill_tokens_per_second:,.0f} tokens/s, {shares.prefill_operations_per_second / 1e9:,.0f} "
        f"GOP/s in products, {shares.prefill_share:.0%} of the {shares.bare_operations_per_second / 1e9:,.0f} GOP/s "
        "of the fastest bare int8 product."
    )
    console.print(
        f"Decoding one sequence: {shares.decode_bytes_per_second / 1e9:.1f} GB/s, {shares.decode_share:.0%} of the "
        f"{shares.read_bytes_per_second / 1e9:.1f} GB/s that memory is read at."
    )


def measure_products(
    shapes: Sequence[ProductShape], ways: Sequence[Way], rounds: int, progress: Progress
) -> dict[str, dict[str, dict[int, float]]]:
    """Seconds of one product: by shape, way and number of rows."""
    task = progress.add_task("products", total=len(shapes))
    found = {}
    for shape in shapes:
        progress.update(task, description=f"products: {shape.name}")
        rows = [number for number in ROWS if shape.name != HEAD or number <= MOST_HEAD_ROWS]
        found[shape.name] = product_seconds(shape, rows, ways, rounds)
        progress.advance(task)
    return found


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description="The engine's rates against the bare limits of the processor.")
    parser.add_argument("--model", default="smollm2", help="a name, a .gguf file or a directory (default: smollm2)")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each kind (default: 7)")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, help="folder for the result")
    options = parser.parse_args()
    console = Console(stderr=True)
    facts = machine_facts()
    path = resolve(options.model)
    with console.status(f"Loading {path.name}"):
        model = ServedModel(path, {"max_num_batched_tokens": str(PREFILL)})
    if model.decoder.ops.name != "native":
        console.print("The native library is not built, and it is what this holds against the limits.")
        return 1
    text = load_tokenizer(path).encode("\n\n".join((data_files.prose(), *data_files.humaneval_functions())))
    threads = sorted({1, torch.get_num_threads()})
    ways = [*bare_ways(), *own_ways(model.decoder.ops.linear)]
    shapes = product_shapes(model.decoder.config)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bandwidth = {number: read_bandwidth(number, options.rounds) for number in threads}
        products = measure_products(shapes, ways, options.rounds, progress)
        task = progress.add_task("steps", total=len(STEPS))
        parts = {}
        for name, shape in STEPS.items():
            parts[name] = measure_parts(model, shape, text, options.rounds)
            progress.advance(task)
    bare = min(layers_seconds(products, shapes, way.name, PREFILL) for way in ways if way.is_bare and way.bits == 8)
    num_bytes = bytes_per_step(model, STEPS["decode, 1 sequence"].context)
    shares = shares_of(parts, shapes, bare, num_bytes, max(bandwidth.values()))
    print_products(console, products, shapes, ways)
    print_parts(console, parts)
    print_shares(console, shares)
    result = {
        "question": "the engine's rates in products, prefill and decoding against the bare limits of the processor",
        "command": command_line(),
        "machine": facts,
        "model": path.name,
        "settings": {"quantization": model.config.quantization, "kv_cache_dtype": model.info.dtype},
        "threads": torch.get_num_threads(),
        "unit": "seconds, bytes, operations",
        "read_bytes_per_second": bandwidth,
        "decode_bytes": num_bytes,
        "products": products,
        "steps": {name: {**asdict(of_step), "rest": of_step.rest} for name, of_step in parts.items()},
        "shares": asdict(shares),
    }
    write_result(options.results / "cpu_limits.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
