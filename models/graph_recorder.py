"""Records a piece of device work once, to be replayed with one launch: the few calls of torch.cuda that this takes.

Knows no model and no batch. What it records must read and write tensors that stay where they are.
"""

from collections.abc import Callable
from typing import Protocol

import torch


class RecordedGraph(Protocol):
    """Work that was recorded."""

    def replay(self) -> None:
        """Do the work again, on the tensors it was recorded with. Does not wait for the device."""
        ...


class GraphRecorder(Protocol):
    """Makes graphs that are never replayed at the same time, and so may share the memory of their temporaries."""

    def record(self, work: Callable[[], None]) -> RecordedGraph:
        """Run `work` to warm up, then record it.

        Args:
            work: launches kernels, always the same ones on the same tensors; must not wait for the device. All that
                it does only once (compiling, allocating what stays) happens in the warm-up.
        """
        ...


class CudaGraphRecorder:
    """CUDA graphs, all on one stream and in one memory pool. Record the largest first: the others fit in its memory."""

    def __init__(self, device: torch.device) -> None:
        """Prepare a stream on `device`."""
        # One stream for every warm-up and every capture: cuBLAS and hipBLASLt make their handle and workspace at a
        # stream's first product, which must not be inside a capture.
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> RecordedGraph:
        """Run `work` to warm up, then record it; see `GraphRecorder`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
        graph = torch.cuda.CUDAGraph()
        # Entering waits for the device. "thread_local": a call of another thread (a watchdog that polls an event)
        # does not end the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph
