"""How long the host takes to plan one step's attention, by kind of batch.

Run as python -m benchmarks.planner_cost. Prints medians in microseconds and the sizes of the lists. Needs no GPU;
the size of the device is given.
"""

import argparse
import statistics
import time

import numpy as np

from kernels.attention.planner import Int32Array, PlanSettings, plan_work
from kernels.attention.tuning import TileConfig

Lengths = tuple[list[int], list[int]]  # query lengths and sequence lengths


def batches(seed: int) -> dict[str, Lengths]:
    """Kinds of steps, of up to 256 sequences."""
    draw = np.random.default_rng(seed).integers
    return {
        "1 decode of 100k": ([1], [100_000]),
        "8 decodes of 32k": ([1] * 8, [32_768] * 8),
        "64 decodes of 2k beside 1 of 100k": ([1] * 65, [100_000, *[2000] * 64]),
        "256 decodes of 0.2k to 4k": ([1] * 256, draw(200, 4000, 256).tolist()),
        "254 decodes beside 2 chunks of 1k": ([1] * 254 + [1024] * 2, [*draw(200, 8000, 254).tolist(), 4096, 1024]),
        "prefill of 8k": ([8192], [8192]),
    }


def main() -> None:
    """Time each kind of batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--target-programs", type=int, default=264, help="programs that fill the device")
    parser.add_argument("--sliding-window", type=int, default=None)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    settings = PlanSettings(
        group_size=4,
        num_kv_heads=8,
        sliding_window=arguments.sliding_window,
        decode_tile=TileConfig(query_rows=16, keys=64, num_warps=4, num_stages=3),
        prefill_tile=TileConfig(query_rows=128, keys=64, num_warps=8, num_stages=3),
        target_programs=arguments.target_programs,
        segment_keys=512 if arguments.batch_invariant else None,
    )
    print(f"{'batch':34s} {'median us':>9s} {'decode':>7s} {'prefill':>7s} {'merges':>7s} {'slots':>7s}")
    for name, (query_lens, seq_lens) in batches(arguments.seed).items():
        starts = np.cumsum([0, *query_lens], dtype=np.int32)
        lens = np.array(seq_lens, dtype=np.int32)
        median = 1e6 * statistics.median(time_plan(starts, lens, settings) for _ in range(arguments.repeats))
        plan = plan_work(starts, lens, settings)
        sizes = (len(plan.decode_items), len(plan.prefill_items), len(plan.merges), plan.num_slots)
        print(f"{name:34s} {median:9.0f}" + "".join(f" {size:7d}" for size in sizes))


def time_plan(query_start_loc: Int32Array, seq_lens: Int32Array, settings: PlanSettings) -> float:
    """Seconds of one plan."""
    begin = time.perf_counter()
    plan_work(query_start_loc, seq_lens, settings)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
