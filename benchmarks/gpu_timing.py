"""Times work on a device: medians, with a cold L2 cache and with the host well ahead of the device.

Also the two ceilings that every other number is held against. A dry run times by the wall clock on the CPU: its
numbers mean nothing, its code paths are the same. Knows no kernel of ours.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

MAX_SECONDS = 0.25  # of one measurement, the flushes included
MIN_REPEATS, MAX_REPEATS = 7, 60
DRY_REPEATS = 1
# Reading twice the gigabytes per millisecond of any card keeps it busy for about half a millisecond: long enough for
# the host to queue what is timed, so that no launch is waited for. It also evicts the last run's data from the L2.
FLUSH_BYTES = 2 << 30
COPY_BYTES = 4 << 30
MATRIX_SIZE = 8192
WARM_UP_SECONDS = 0.5  # a card that idles runs at a fifth of its clock


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run, over all repeats."""

    median: float
    least: float
    most: float
    repeats: int
    first: float  # seconds of the first run, compilation included


class Timer(Protocol):
    """Runs work until its median is known."""

    def time(self, run: Callable[[], object], *, flush: bool = True, max_seconds: float = MAX_SECONDS) -> Timing:
        """Time `run`, which queues work on the device and does not wait for it.

        Args:
            run: the same work each time.
            flush: evict the cache between repeats; off where the work itself is far larger than the cache.
            max_seconds: about how long to repeat it, unless that is fewer than `MIN_REPEATS` times.
        """
        ...


class CudaTimer:
    """Device events around each run."""

    def __init__(self, device: torch.device) -> None:
        """Reserve the buffer whose reading empties the cache, and let the clocks rise."""
        self._device = device
        self._buffer = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=device)
        self._warm_up()

    def time(self, run: Callable[[], object], *, flush: bool = True, max_seconds: float = MAX_SECONDS) -> Timing:
        """See `Timer`. Flushes by reading: lines left dirty by a write would be written back while the run is timed."""
        torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        run()
        torch.cuda.synchronize(self._device)
        first = time.perf_counter() - started
        started = time.perf_counter()
        self._timed(run, flush, 2)
        estimate = (time.perf_counter() - started) / 2
        repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(max_seconds / estimate)))
        return _timing(self._timed(run, flush, repeats), first)

    def _timed(self, run: Callable[[], object], flush: bool, repeats: int) -> list[float]:
        starts, ends = (
            [torch.cuda.Event(enable_timing=True) for _ in range(repeats)],
            [torch.cuda.Event(enable_timing=True) for _ in range(repeats)],
        )
        for start, end in zip(starts, ends, strict=True):
            if flush:
                self._buffer.sum()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) / 1e3 for start, end in zip(starts, ends, strict=True)]

    def _warm_up(self) -> None:
        matrix = torch.randn(4096, 4096, device=self._device, dtype=torch.bfloat16)
        deadline = time.perf_counter() + WARM_UP_SECONDS
        while time.perf_counter() < deadline:
            for _ in range(20):
                matrix @ matrix
            torch.cuda.synchronize(self._device)


class WallTimer:
    """The clock on the wall, for a dry run."""

    def time(self, run: Callable[[], object], *, flush: bool = True, max_seconds: float = MAX_SECONDS) -> Timing:
        """See `Timer`; there is no cache worth flushing."""
        seconds = []
        for _ in range(1 + DRY_REPEATS):
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
        return _timing(seconds[1:], seconds[0])


def make_timer(device: torch.device) -> Timer:
    """Events on a card, the wall clock elsewhere."""
    return CudaTimer(device) if device.type == "cuda" else WallTimer()


def copy_bandwidth(timer: Timer, device: torch.device, num_bytes: int) -> tuple[float, Timing]:
    """Bytes per second, read plus written, of a plain copy on the device."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    timing = timer.time(lambda: target.copy_(source), flush=False)
    return 2 * num_bytes / timing.median, timing


def matrix_rate(timer: Timer, device: torch.device, size: int) -> tuple[float, Timing]:
    """Floating-point operations per second of a square product in bfloat16, on random data: zeros run faster."""
    left, right = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    timing = timer.time(lambda: left @ right, flush=False)
    return 2 * size**3 / timing.median, timing


def _timing(seconds: list[float], first: float) -> Timing:
    return Timing(median(seconds), min(seconds), max(seconds), len(seconds), first)
