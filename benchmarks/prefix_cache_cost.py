"""What caching prefixes costs the host: hashing, looking up, registering, sharing and freeing the blocks of one prompt.

No model and no torch: the block manager alone, in processor time. Writes benchmarks/results/prefix_cache_cost.json.
"""

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS_DIR, command_line, machine_facts, write_result
from paged_cache.block_table import BlockTable
from paged_cache.manager import BlockManager
from paged_cache.prefix_cache import CachedPrefix

OPERATIONS = ("hash", "look up", "look up a miss", "share", "free", "allocate", "register", "evict")


def seconds_of(call: Callable[[], object]) -> float:
    """Processor time of one call."""
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def run_once(manager: BlockManager, token_ids: list[int]) -> dict[str, float]:
    """Seconds of each operation on the blocks of one prompt, which the manager's blocks hold just so."""
    num_tokens, seconds = len(token_ids), {}
    prefix, table = manager.new_prefix("tenant", "salt"), BlockTable()
    seconds["hash"] = seconds_of(lambda: prefix.extend(token_ids))
    seconds["look up a miss"] = seconds_of(lambda: manager.find_prefix(prefix, num_tokens))
    seconds["evict"] = seconds_of(lambda: manager.allocate(table, 0, num_tokens))  # what the last run has left
    seconds["register"] = seconds_of(lambda: manager.register(table, prefix, num_tokens))
    manager.free(table)
    found: list[CachedPrefix] = []
    seconds["look up"] = seconds_of(lambda: found.append(manager.find_prefix(prefix, num_tokens)))
    assert found[0].num_tokens == num_tokens - num_tokens % manager.block_size
    seconds["share"] = seconds_of(lambda: manager.share_prefix(table, found[0]))
    seconds["free"] = seconds_of(lambda: manager.free(table))
    empty, other = BlockManager(manager.num_blocks, manager.block_size), BlockTable()
    seconds["allocate"] = seconds_of(lambda: empty.allocate(other, 0, num_tokens))
    return seconds


def measure(num_tokens: int, block_size: int, num_runs: int) -> dict[str, float]:
    """Seconds of each operation, medians over runs; the first one, which evicts nothing, does not count."""
    manager = BlockManager(-(-num_tokens // block_size), block_size)
    rng = random.Random(0)
    runs = []
    gc.disable()  # what it collects is not of these operations alone
    for _ in range(num_runs + 1):
        runs.append(run_once(manager, [rng.randrange(128_000) for _ in range(num_tokens)]))
    gc.enable()
    return {name: median(run[name] for run in runs[1:]) for name in OPERATIONS}


def print_costs(console: Console, costs: Sequence[dict[str, object]]) -> None:
    """One line per operation and block size."""
    table = Table(
        *("block size", "operation", "us per block", "ms per prompt"), title="The prefix cache's time for one prompt"
    )
    for cost in costs:
        table.add_row(
            str(cost["block_size"]),
            str(cost["operation"]),
            f"{cost['microseconds_per_block']:.2f}",
            f"{cost['milliseconds']:.2f}",
        )
    console.print(table)


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description="The prefix cache's time for one prompt, without any model.")
    parser.add_argument("--tokens", type=int, default=131_072, help="of the prompt (default: 131072)")
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 32, 64], help="tokens of a block")
    parser.add_argument("--runs", type=int, default=9, help="whose median is taken (default: 9)")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, help="folder for the result")
    options = parser.parse_args()
    facts = machine_facts()
    costs: list[dict[str, object]] = []
    for block_size in options.block_size:
        for name, seconds in measure(options.tokens, block_size, options.runs).items():
            per_block = seconds * 1e6 / -(-options.tokens // block_size)
            costs.append(
                {
                    "block_size": block_size,
                    "operation": name,
                    "microseconds_per_block": round(per_block, 3),
                    "milliseconds": round(seconds * 1e3, 3),
                }
            )
    print_costs(Console(stderr=True), costs)
    result = {
        "question": f"what the prefix cache's operations cost for a prompt of {options.tokens:,} tokens",
        "command": command_line(),
        "machine": facts,
        "costs": costs,
    }
    write_result(options.results / "prefix_cache_cost.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
