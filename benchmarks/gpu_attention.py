"""How near paged attention comes to the card's limits: decode, prefill, mixed batches, quantised caches, invariance.

Decode is held against a plain copy on the same card, prefill against a plain product, and both against torch's
attention over contiguous tensors. Part "attention" of benchmarks/gpu_check.sh.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_batches import Batch, Heads, Rows, contiguous, decodes, make_batch, prefills
from benchmarks.gpu_part import Part, run_part
from benchmarks.gpu_timing import COPY_BYTES, MATRIX_SIZE, Timer, Timing, copy_bandwidth, matrix_rate
from kernels.attention.backend import PROGRAMS_PER_MULTIPROCESSOR, AttentionBackend, select_backend
from kernels.attention.triton_backend import TritonBackend
from tests.kernels.paged_batches import relative_error

HOST_REPEATS = 20
OTHER_BLOCK_SIZES = (32, 64)
PROGRAMS = (1, 2, 3, 4)  # per multiprocessor


@dataclass(frozen=True, slots=True)
class Shapes:
    """What is measured; the names stand for the full sizes."""

    heads: Heads
    decodes: Mapping[str, Rows]
    prefills: Mapping[str, Rows]
    mixed_decodes: Rows
    mixed_prefills: Rows
    many_rows: Rows  # whose planning is timed
    copy_bytes: int
    matrix_size: int


FULL = Shapes(
    heads=Heads(),
    decodes={"1 x 32k": decodes(1, 32768), "8 x 32k": decodes(8, 32768), "64 x 2k": decodes(64, 2048)},
    prefills={"4k": prefills(1, 4096), "16k": prefills(1, 16384)},
    mixed_decodes=decodes(64, 4096),
    mixed_prefills=Rows((1024, 1024), (2048, 4096)),
    many_rows=decodes(256, 4096),
    copy_bytes=COPY_BYTES,
    matrix_size=MATRIX_SIZE,
)
SMALL = Shapes(
    heads=Heads(4, 2, 16),
    decodes={"1 x 32k": decodes(1, 64), "8 x 32k": decodes(2, 64), "64 x 2k": decodes(2, 32)},
    prefills={"4k": prefills(1, 16), "16k": prefills(1, 32)},
    mixed_decodes=decodes(2, 32),
    mixed_prefills=Rows((8,), (16,)),
    many_rows=decodes(2, 16),
    copy_bytes=1 << 12,
    matrix_size=8,
)


class AttentionBench:
    """The measurements, each a function of shapes; later ones are held against earlier ones."""

    def __init__(self, part: Part) -> None:
        """Choose the backends as the server would."""
        self._part = part
        self._shapes = SMALL if part.is_small else FULL
        self._default = select_backend("triton", part.device)
        self._invariant = select_backend("triton", part.device, batch_invariant=True)
        self._bandwidth = 0.0  # bytes per second of a copy
        self._rate = 0.0  # operations per second of a product

    def run(self) -> None:
        """Everything, the ceilings first."""
        part, shapes = self._part, self._shapes
        part.measure("copy", self._copy)
        part.measure("bf16 product", self._product)
        for name, rows in shapes.decodes.items():
            part.measure(f"decode {name}", self._job(self._decode, rows))
            part.measure(f"paging decode {name}", self._job(self._paging, rows))
        for name, rows in shapes.prefills.items():
            part.measure(f"prefill {name}", self._job(self._prefill, rows))
            part.measure(f"paging prefill {name}", self._job(self._paging, rows))
        part.measure("mixed batch", self._mixed)
        for dtype, short in (("int8", "int8"), ("float8_e4m3fn", "fp8")):
            for name in ("8 x 32k", "64 x 2k"):
                part.measure(f"{short} cache {name}", self._job(self._quantised, shapes.decodes[name], dtype))
        for name, rows in shapes.decodes.items():
            part.measure(f"invariant decode {name}", self._job(self._price_of_invariance, rows))
        part.measure("invariant prefill 4k", self._job(self._price_of_invariance, shapes.prefills["4k"]))
        for block_size in OTHER_BLOCK_SIZES:
            for name, rows in (("decode 8 x 32k", shapes.decodes["8 x 32k"]), ("prefill 4k", shapes.prefills["4k"])):
                part.measure(f"blocks of {block_size}, {name}", self._job(self._block_size, rows, block_size))
        for name, rows in shapes.decodes.items():
            part.measure(f"programs per multiprocessor, decode {name}", self._job(self._occupancy, rows))
        part.measure("planning 256 rows", self._planning)

    def _job(
        self, method: Callable[..., Mapping[str, object]], *arguments: object
    ) -> Callable[[], Mapping[str, object]]:
        return lambda: method(*arguments)

    def _copy(self) -> Mapping[str, object]:
        self._bandwidth, timing = copy_bandwidth(self._part.timer, self._part.device, self._shapes.copy_bytes)
        return {**_columns(timing), "gb_per_s": self._bandwidth / 1e9}

    def _product(self) -> Mapping[str, object]:
        self._rate, timing = matrix_rate(self._part.timer, self._part.device, self._shapes.matrix_size)
        return {**_columns(timing), "tflops": self._rate / 1e12}

    def _decode(self, rows: Rows) -> Mapping[str, object]:
        batch = self._batch(rows)
        timing = self._time(self._default, batch)
        rate = batch.num_bytes / timing.median
        return {**_columns(timing), "gb_per_s": rate / 1e9, "copy_share": _ratio(rate, self._bandwidth)}

    def _prefill(self, rows: Rows) -> Mapping[str, object]:
        batch = self._batch(rows)
        timing = self._time(self._default, batch)
        rate = batch.num_flops / timing.median
        return {**_columns(timing), "tflops": rate / 1e12, "product_share": _ratio(rate, self._rate)}

    def _paging(self, rows: Rows) -> Mapping[str, object]:
        """Scattered blocks against one block per sequence under the same kernel, and against torch's attention."""
        batch = self._batch(rows)
        paged = self._time(self._default, batch)
        whole = self._time(self._default, self._batch(rows, block_size=max(rows.seq_lens), in_order=True))
        values: dict[str, object] = {**_columns(paged), "over_contiguous": paged.median / whole.median}
        query, keys, values_ = contiguous(batch)
        out = self._attend(self._default, batch).unflatten(0, (len(rows.seq_lens), -1)).transpose(1, 2)
        sdpa = []
        for backend in self._sdpa_backends():
            timing = time_sdpa(self._part.timer, backend, query, keys, values_, out)
            values[f"{backend.name.lower()}_ms"] = "not compared" if timing is None else timing.median * 1e3
            if timing is not None:
                sdpa.append(timing.median)
        if sdpa:
            values["over_sdpa"] = paged.median / min(sdpa)
        return values

    def _mixed(self) -> Mapping[str, object]:
        """One launch of both kinds against the two kinds launched alone."""
        some, others = self._shapes.mixed_decodes, self._shapes.mixed_prefills
        decode, prefill, both = (self._time(self._default, self._batch(rows)) for rows in (some, others, some + others))
        parts = decode.median + prefill.median
        return {**_columns(both), "parts_ms": parts * 1e3, "over_parts": both.median / parts}

    def _quantised(self, rows: Rows, dtype: str) -> Mapping[str, object]:
        plain = self._time(self._default, self._batch(rows))
        batch = self._batch(rows, cache_dtype=dtype)
        timing = self._time(self._default, batch)
        rate = batch.num_bytes / timing.median
        return {
            **_columns(timing),
            "gb_per_s": rate / 1e9,
            "copy_share": _ratio(rate, self._bandwidth),
            "over_bf16": timing.median / plain.median,
        }

    def _price_of_invariance(self, rows: Rows) -> Mapping[str, object]:
        batch = self._batch(rows)
        default, invariant = self._time(self._default, batch), self._time(self._invariant, batch)
        return {**_columns(invariant), "over_default": invariant.median / default.median}

    def _block_size(self, rows: Rows, block_size: int) -> Mapping[str, object]:
        default, other = (self._time(self._default, self._batch(rows, block_size=size)) for size in (None, block_size))
        return {**_columns(other), "over_default": other.median / default.median}

    def _occupancy(self, rows: Rows) -> Mapping[str, object]:
        """How finely long key ranges are split: the backend's own choice is a constant that this may correct."""
        batch = self._batch(rows)
        values: dict[str, object] = {"chosen": PROGRAMS_PER_MULTIPROCESSOR}
        for programs in PROGRAMS:
            backend = TritonBackend(programs * self._num_multiprocessors())
            values[f"{programs}_ms"] = self._time(backend, batch).median * 1e3
        return values

    def _planning(self) -> Mapping[str, object]:
        """Host milliseconds of a step's first layer, which plans, and of one that finds the plan made."""
        batch = self._batch(self._shapes.many_rows)
        self._attend(self._default, batch)
        first, later = [], []
        for _ in range(2 if self._part.is_dry else HOST_REPEATS):
            fresh = dataclasses.replace(batch, metadata=dataclasses.replace(batch.metadata))  # as a new step brings it
            for seconds in (first, later):
                self._part.synchronise()
                started = time.perf_counter()
                self._attend(self._default, fresh)
                seconds.append(time.perf_counter() - started)
        return {
            "host_ms_first_layer": median(first) * 1e3,
            "host_ms_later_layer": median(later) * 1e3,
            "host_ms_planning": (median(first) - median(later)) * 1e3,
        }

    # --- how each is run ---

    def _batch(
        self, rows: Rows, cache_dtype: str | None = None, block_size: int | None = None, in_order: bool = False
    ) -> Batch:
        sizes = {} if block_size is None else {"block_size": block_size}
        return make_batch(
            self._shapes.heads, rows, self._part.device, cache_dtype=cache_dtype, in_order=in_order, **sizes
        )

    def _attend(self, backend: AttentionBackend, batch: Batch) -> torch.Tensor:
        return backend.attend(batch.query, batch.kv_layer, batch.metadata, batch.heads.params)

    def _time(self, backend: AttentionBackend, batch: Batch) -> Timing:
        return self._part.timer.time(lambda: self._attend(backend, batch))

    def _num_multiprocessors(self) -> int:
        if self._part.is_dry:
            return 1
        return torch.cuda.get_device_properties(self._part.device).multi_processor_count

    def _sdpa_backends(self) -> tuple[SDPBackend, ...]:
        if self._part.is_dry:
            return (SDPBackend.MATH,)
        return (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def time_sdpa(
    timer: Timer,
    backend: SDPBackend,
    query: torch.Tensor,  # [num_rows, num_q_heads, query_len, head_dim]
    keys: torch.Tensor,  # [num_rows, num_kv_heads, seq_len, head_dim]
    values: torch.Tensor,  # [num_rows, num_kv_heads, seq_len, head_dim]
    paged: torch.Tensor,  # [num_rows, num_q_heads, query_len, head_dim]
) -> Timing | None:
    """One of torch's implementations; None, and why, if it does not take such tensors or disagrees with the pages.

    Whether the paged kernel is right is for the part "checks" to say: here nothing else that was timed is given up.
    """

    def run() -> torch.Tensor:
        return scaled_dot_product_attention(query, keys, values, is_causal=query.shape[2] > 1, enable_gqa=True)

    with sdpa_kernel(backend):
        try:
            error = relative_error(paged, run().double())
        except RuntimeError as reason:  # no kernel for grouped heads, say
            print(f"torch's {backend.name}: {str(reason).splitlines()[0]}", flush=True)
            return None
        if not error < 2e-2:  # both round to bfloat16
            print(f"torch's {backend.name} is not compared: it differs from paged attention by {error:.3g}", flush=True)
            return None
        return timer.time(run)


def _columns(timing: Timing) -> dict[str, object]:
    return {
        "ms": timing.median * 1e3,
        "least_ms": timing.least * 1e3,
        "most_ms": timing.most * 1e3,
        "repeats": timing.repeats,
        "first_s": timing.first,
    }


def _ratio(value: float, ceiling: float) -> float | None:
    return value / ceiling if ceiling else None  # the ceiling could not be measured


def main(argv: list[str] | None = None) -> int:
    """Run the part."""
    return run_part("attention", "Paged attention against the card's limits.", lambda p: AttentionBench(p).run(), argv)


if __name__ == "__main__":
    sys.exit(main())
