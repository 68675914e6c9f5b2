"""What benchmarks/tune_kernels.py chooses among: the layers to tune for, the tiles that may suit them, the batches.

Also compiles candidates ahead of their timing, in processes of their own, into Triton's cache on disk. Times nothing.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import product, repeat
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.gpu_batches import Batch, Heads, Rows, decodes, make_batch, prefills
from kernels.attention.backend import INTERPRETER_PROGRAMS, PROGRAMS_PER_MULTIPROCESSOR
from kernels.attention.triton_backend import SEGMENT_KEYS, TritonBackend, arch_of
from kernels.attention.triton_kernels import attend_kernel
from kernels.attention.tuning import KINDS, TileConfig, TileRow, TileTable

MAX_PROCESSES = 14  # that compile; each has its own context on the card
MAX_TILE = 128 * 128  # elements of a tile of scores, and of a tile of keys
MAX_ACCUMULATORS = 64  # of the output in each thread's 255 registers; twice as many spill
THREADS_PER_WARP = 32
QUANTISED = ("float8_e4m3fn", "int8")


@dataclass(frozen=True, slots=True)
class Layer:
    """A kind of attention layer and its cache."""

    head_dim: int
    group_size: int  # query heads per KV head
    kv_dtype: str  # as the table names it: "float16" stands for bfloat16, in which it is measured
    num_kv_heads: int = 8  # of most models that fit on one card

    @property
    def heads(self) -> Heads:
        """Query heads and KV heads."""
        return Heads(self.num_kv_heads * self.group_size, self.num_kv_heads, self.head_dim)

    @property
    def cache_dtype(self) -> str | None:
        """Of the cache; None = that of the queries."""
        return self.kv_dtype if self.kv_dtype in QUANTISED else None


@dataclass(frozen=True, slots=True)
class Job:
    """One kind of tile of one layer."""

    layer: Layer
    kind: str  # one of KINDS

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind}, heads of {self.layer.head_dim}, group {self.layer.group_size}, {self.layer.kv_dtype}"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of a candidate: spilled registers of each thread, or why it cannot run."""

    config: TileConfig
    num_spills: int
    error: str | None


def jobs() -> Iterator[Job]:
    """The layers of the commonest models first: a run that is cut short has done those."""
    sizes = [(128, 4), (128, 8), (64, 4), (256, 2), (128, 1), (64, 8), (256, 4), (64, 1), (128, 7)]
    for dtypes in (("float16",), QUANTISED):
        for (head_dim, group_size), kv_dtype, kind in product(sizes, dtypes, KINDS):
            yield Job(Layer(head_dim, group_size, kv_dtype), kind)


def candidates(job: Job) -> list[TileConfig]:
    """Tiles worth compiling. What surely spills or exceeds shared memory is left out; the compiler drops the rest."""
    least_rows = max(16, 1 << (job.layer.group_size - 1).bit_length())
    rows, keys, warps = {
        "decode": ((least_rows,), (32, 64, 128), (2, 4, 8)),
        # 64 rows are the least that Hopper's warp-group product takes.
        "prefill": ((64, 128), (32, 64, 128), (4, 8)),
        "invariant": ((least_rows, 2 * least_rows, 64), (32, 64, 128), (4, 8)),
    }[job.kind]
    # The pipeline's depth is shared out between two loads, the second of which waits for the first: block ids, and the
    # keys and values that lie there. (stages - 1) // 2 tiles are in flight, so 4 stages are the same kernel as 3. Three
    # tiles are tried for decode alone, which has next to nothing to compute while it waits.
    stages = (2, 3, 5, 7) if job.kind == "decode" else (2, 3, 5)
    found = [TileConfig(*sizes) for sizes in product(sorted(set(rows)), keys, warps, stages)]
    return [
        config
        for config in found
        if config.keys * max(config.query_rows, job.layer.head_dim) <= MAX_TILE
        and config.query_rows * job.layer.head_dim <= MAX_ACCUMULATORS * THREADS_PER_WARP * config.num_warps
        and (job.kind != "invariant" or SEGMENT_KEYS % config.keys == 0)
    ]


def batches(job: Job, device: torch.device, *, is_small: bool) -> list[Batch]:
    """What a candidate is timed on: long and many decodes, a whole prompt and chunks of long ones, or one of each."""
    if is_small:
        rows = {
            "decode": [decodes(2, 40)],
            "prefill": [prefills(1, 20)],
            "invariant": [decodes(1, 40) + prefills(1, 20)],
        }
    else:
        rows = {
            "decode": [decodes(8, 16384), decodes(64, 2048)],
            "prefill": [prefills(1, 4096), Rows((1024, 1024), (4096, 8192))],
            "invariant": [decodes(8, 16384), prefills(1, 4096)],
        }
    return [make_batch(job.layer.heads, one, device, cache_dtype=job.layer.cache_dtype) for one in rows[job.kind]]


def backend_with(job: Job, config: TileConfig | None, table: TileTable, device: torch.device) -> TritonBackend:
    """The backend as the server makes it, but for the one row of the table; None = the table as it is."""
    if config is not None:
        table = table.with_row(row_of(job, config, device, source=""))
    programs = INTERPRETER_PROGRAMS
    if device.type == "cuda":
        programs = torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_MULTIPROCESSOR
    return TritonBackend(programs, batch_invariant=job.kind == "invariant", tiles=table)


def row_of(job: Job, config: TileConfig, device: torch.device, source: str) -> TileRow:
    """The table's row for a configuration on this device."""
    layer = job.layer
    return TileRow(arch_of(device), layer.head_dim, layer.group_size, job.kind, layer.kv_dtype, config, source)


def attend(backend: TritonBackend, batch: Batch) -> torch.Tensor:
    """One launch, [num_tokens, num_q_heads, head_dim]."""
    return backend.attend(batch.query, batch.kv_layer, batch.metadata, batch.heads.params)


class Compilers:
    """Processes that compile candidates side by side; on a CPU, where nothing is compiled, this process."""

    def __init__(self, device: torch.device) -> None:
        """Start them; `close` ends them."""
        self._device = device
        self._pool = self._start()

    def compile_all(self, job: Job, configs: Sequence[TileConfig]) -> list[Compiled]:
        """Compile every candidate of a job."""
        if self._pool is None:
            return [compile_one(job, config, str(self._device)) for config in configs]
        try:
            return list(self._pool.map(compile_one, repeat(job), configs, repeat(str(self._device))))
        except BrokenProcessPool:
            # Some candidates do not make the compiler refuse but bring it down; which one it was is not known.
            self._pool = self._start()
            return [Compiled(config, 0, "the compiler died of a candidate of this job") for config in configs]

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _start(self) -> ProcessPoolExecutor | None:
        if self._device.type == "cpu":
            return None
        num_processes = max(1, min(MAX_PROCESSES, len(os.sched_getaffinity(0)) - 1))
        # Spawned: a forked process cannot use the card that its parent uses.
        return ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"))


def compile_one(job: Job, config: TileConfig, device_name: str) -> Compiled:
    """Run a candidate once on a small batch, with the types and alignments of the large ones."""
    device = torch.device(device_name)
    known = _kernels(device)
    try:
        backend = backend_with(job, config, TileTable.load(), device)
        for batch in batches(job, device, is_small=True):
            attend(backend, batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # any: the compiler's own assertions are of no common type
        return Compiled(config, 0, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120])
    added = [kernel for key, kernel in _kernels(device).items() if key not in known]
    return Compiled(config, max((kernel.n_spills for kernel in added), default=0), None)


def _kernels(device: torch.device) -> dict[str, Any]:
    """The attention kernels that this process has compiled so far."""
    if device.type != "cuda":
        return {}
    return dict(attend_kernel.device_caches[device.index or 0][0])
