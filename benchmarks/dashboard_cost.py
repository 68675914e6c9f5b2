"""What watching the block pool costs: the engine's report, its message, and the picture that the edge draws of it.

Every block of the pool is in some table, and in no order, which is the worst case. Runs anywhere, without a model;
writes benchmarks/results/dashboard_cost.json.
"""

import argparse
import gzip
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS_DIR, command_line, machine_facts, write_result
from paged_cache.block_table import BlockTable
from paged_cache.manager import BlockManager
from scheduler.pool_report import report_pool
from scheduler.request import Request
from scheduler.request import Sequence as RequestSequence
from scheduler.sampling_params import SamplingParams
from server.dashboard.pool_image import draw_pool
from server.ipc import MessageCodec
from server.messages import EngineMessage, PoolInspection

BLOCK_SIZE = 16
NUM_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one picture, medians in milliseconds, and bytes."""

    num_blocks: int
    report_ms: float  # in the engine, between two steps
    encode_ms: float  # likewise
    decode_ms: float  # on the edge's event loop
    draw_ms: float  # in a thread of the edge
    pack_ms: float  # likewise
    message_bytes: int
    picture_bytes: int
    packed_bytes: int


def full_pool(num_blocks: int) -> tuple[BlockManager, list[RequestSequence]]:
    """A pool whose every block some sequence holds, in no order."""
    ids = list(range(num_blocks))
    random.Random(1).shuffle(ids)
    each = num_blocks // NUM_SEQUENCES
    manager = BlockManager(num_blocks, BLOCK_SIZE)
    sequences = []
    for number in range(NUM_SEQUENCES):
        request = Request(f"cmpl-{number:032x}-0", (1,), SamplingParams(max_tokens=1), 0.0)
        sequence = RequestSequence(number, request, 0, [1], manager.new_prefix())
        sequence.block_table = BlockTable(ids[number * each : (number + 1) * each])
        sequences.append(sequence)
    return manager, sequences


def measure(num_blocks: int, repeats: int) -> Cost:
    """Each part by itself."""
    manager, sequences = full_pool(num_blocks)
    codec = MessageCodec(EngineMessage)
    report_ms, report = timed(repeats, lambda: report_pool(manager, sequences))
    encode_ms, frame = timed(repeats, lambda: codec.encode(PoolInspection(1, report, 0.0)))
    decode_ms, _ = timed(repeats, lambda: codec.decode(memoryview(frame)[4:]))
    draw_ms, picture = timed(repeats, lambda: draw_pool(report, 1, 1.0))
    pack_ms, packed = timed(repeats, lambda: gzip.compress(picture, compresslevel=1, mtime=0))
    sizes = (len(frame), len(picture), len(packed))
    return Cost(num_blocks, report_ms, encode_ms, decode_ms, draw_ms, pack_ms, *sizes)


def timed(repeats: int, call: Callable[[], Any]) -> tuple[float, Any]:
    """The median of a call in milliseconds, and what it returned."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        value = call()
        seconds.append(time.perf_counter() - began)
    return 1000 * median(seconds), value


def show(costs: Sequence[Cost]) -> None:
    """As a table."""
    table = Table("blocks", "report ms", "encode ms", "decode ms", "draw ms", "pack ms", "message", "packed picture")
    for cost in costs:
        times = (cost.report_ms, cost.encode_ms, cost.decode_ms, cost.draw_ms, cost.pack_ms)
        sizes = (cost.message_bytes, cost.packed_bytes)
        table.add_row(
            f"{cost.num_blocks:,}", *(f"{ms:.2f}" for ms in times), *(f"{size / 1e6:.2f} MB" for size in sizes)
        )
    Console().print(table)


def main() -> None:
    """Measure pools of several sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULTS_DIR / "dashboard_cost.json")
    arguments = parser.parse_args()
    costs = [measure(num_blocks, arguments.repeats) for num_blocks in arguments.blocks]
    show(costs)
    result = {
        "question": "what one picture of the block pool costs the engine and the edge, all blocks in use",
        "command": command_line(),
        "machine": machine_facts(),
        "num_sequences": NUM_SEQUENCES,
        "costs": [asdict(cost) for cost in costs],
    }
    write_result(arguments.output, result)


if __name__ == "__main__":
    main()
