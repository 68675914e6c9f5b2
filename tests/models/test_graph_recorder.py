"""The order of the calls that make a CUDA graph, on stand-ins for torch.cuda that take what the real ones take."""

import inspect
from contextlib import contextmanager

import pytest
import torch

from models.graph_recorder import CudaGraphRecorder

CUDA = torch.device("cuda")


class FakeStream:
    device = CUDA

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, stream):
        self.log.append(f"{self.name} waits for {stream.name}")


@pytest.fixture
def log(monkeypatch):
    log = []
    streams = iter(["side", "another"])
    real_graph = torch.cuda.graph

    @contextmanager
    def on_stream(stream):
        log.append(f"enter {stream.name}")
        yield
        log.append(f"leave {stream.name}")

    @contextmanager
    def graph(*args, **kwargs):
        call = inspect.signature(real_graph).bind(*args, **kwargs).arguments
        log.append(f"capture on {call['stream'].name} in {call['pool']}")
        yield
        log.append("captured")

    class FakeGraph:
        def replay(self):
            log.append("replay")

    for name, fake in {
        "Stream": lambda device: FakeStream(log, next(streams)),
        "current_stream": lambda device: FakeStream(log, "main"),
        "stream": on_stream,
        "graph_pool_handle": lambda: "pool",
        "graph": graph,
        "CUDAGraph": FakeGraph,
    }.items():
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, fake)
    return log


def test_every_graph_is_warmed_up_and_captured_on_one_stream_in_one_pool(log):
    recorder = CudaGraphRecorder(CUDA)
    first = recorder.record(lambda: log.append("first"))
    recorder.record(lambda: log.append("second"))
    first.replay()
    assert log == [
        step
        for name in ("first", "second")
        for step in (
            "side waits for main",
            "enter side",
            name,
            "leave side",
            "capture on side in pool",
            name,
            "captured",
        )
    ] + ["replay"]
