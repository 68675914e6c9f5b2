"""The whole engine on random weights of Llama 3.1 8B's shape: output tokens per second, and the host's part of a step.

Scheduler and model runner, stepped one after another and overlapped, with and without CUDA graphs. Part "engine" of
benchmarks/gpu_check.sh.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_part import Part, run_part
from benchmarks.gpu_serving import GREEDY, SAMPLED, Engine, Way, build_engine, make_graphs, serve
from benchmarks.gpu_workload import FULL, SMALL, Workload, prompts
from models.cuda_graphs import CudaGraphs

HOST_PARTS = ("schedule", "launch", "result", "update")
WARM_UP_TOKENS = 2  # a step of prefill and one of decode: all that there is to compile


def measure(part: Part) -> None:
    """Every number of sequences in every way, then sampling."""
    workload = SMALL if part.is_small else FULL
    engine = build_engine(
        workload.config, workload.dtype, workload.num_blocks, workload.block_size, part.device, part.synchronise
    )
    batch_sizes = sorted(set(workload.num_requests.values()))
    made: list[CudaGraphs] = []
    part.measure("capture", lambda: _capture(engine, workload, batch_sizes, made))
    ways = [Way(graphs, is_overlapped) for graphs in (None, *made) for is_overlapped in (False, True)]
    for name, num_requests in workload.num_requests.items():
        for way in ways:
            part.measure(
                f"{name}, {way.name}", lambda n=num_requests, way=way: _rates(engine, workload, way, n, GREEDY)
            )
    some, way = workload.num_requests["64 sequences"], ways[-2]
    part.measure(f"64 sequences, {way.name}, sampled", lambda: _rates(engine, workload, way, some, SAMPLED))


def _capture(
    engine: Engine, workload: Workload, batch_sizes: list[int], made: list[CudaGraphs]
) -> Mapping[str, object]:
    started = time.perf_counter()
    made.append(make_graphs(engine, batch_sizes, -(-workload.max_model_len // workload.block_size)))
    return {"batch_sizes": str(batch_sizes), "capture_s": time.perf_counter() - started}


def _rates(
    engine: Engine, workload: Workload, way: Way, num_requests: int, sampling: Mapping[str, float]
) -> Mapping[str, object]:
    started = time.perf_counter()
    warm_up = prompts(workload, num_requests, seed=0)
    serve(engine, way, warm_up, WARM_UP_TOKENS, workload.max_batched_tokens, sampling)
    first = time.perf_counter() - started
    served = serve(
        engine,
        way,
        prompts(workload, num_requests, seed=1),
        workload.output_tokens,
        workload.max_batched_tokens,
        sampling,
    )
    expected = num_requests * workload.output_tokens
    assert served.num_tokens == expected, f"{served.num_tokens} tokens came, not {expected}"
    values = {"tokens_per_s": served.num_tokens / served.seconds, "step_ms": median(served.step_seconds) * 1e3}
    if served.host_seconds:
        for column, name in (("host_ms", "total"), *((f"{name}_ms", name) for name in HOST_PARTS)):
            values[column] = median(getattr(seconds, name) for seconds in served.host_seconds) * 1e3
    return {**values, "first_s": first}


def main(argv: list[str] | None = None) -> int:
    """Run the part."""
    return run_part("engine", "The whole engine on random weights.", measure, argv)


if __name__ == "__main__":
    sys.exit(main())
