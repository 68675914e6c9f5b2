"""What is said of processors is what they did, and the stand-in for a model says a token where a model would."""

import mmap
import os
import subprocess
import sys
import threading
import time

import pytest

from benchmarks.edge_cost import Round, _cost, _refuse_incomplete
from benchmarks.paced_server import PacedRunner
from benchmarks.packet_client import Packets
from benchmarks.processor_time import ProcessorTime, child_running, processor_time
from scheduler.output import KnownRow, NewRow, SchedulerOutput
from scheduler.sampling_params import SamplingParams


def compute(seconds: float) -> None:
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass


def test_processor_time_counts_all_threads_and_their_wakeups():
    before = processor_time(os.getpid())
    released = threading.Event()
    other = threading.Thread(target=lambda: (compute(0.05), released.wait()))
    other.start()
    compute(0.05)
    for _ in range(20):
        time.sleep(0.001)
    spent = processor_time(os.getpid()) - before
    released.set()
    other.join()
    assert spent.seconds >= 0.1
    assert 0.05 <= spent.main_seconds < spent.seconds - 0.04
    assert spent.num_wakeups >= 20


def test_the_child_with_an_argument_is_found():
    with subprocess.Popen([sys.executable, "-c", "input()", "some-argument"], stdin=subprocess.PIPE) as child:
        assert child_running(os.getpid(), "some-argument") == child.pid
        with pytest.raises(LookupError, match="no child that runs other-argument"):
            child_running(os.getpid(), "other-argument")


def test_a_token_costs_what_long_answers_cost_more_than_short_ones():
    def round_of(server: float, engine: float, wakeups: float) -> Round:
        return Round(
            ProcessorTime(server, 0.0, wakeups, server), ProcessorTime(engine, 0.0, 0, engine), 0.001, server + engine
        )

    cost = _cost("chat", 8, round_of(0.002, 0.001, 10.0), round_of(0.002 + 63 * 20e-6, 0.001 + 63 * 5e-6, 10.0 + 63))
    assert cost.server_per_token == pytest.approx(20)
    assert cost.engine_per_token == pytest.approx(5)
    assert cost.server_wakeups_per_token == pytest.approx(1)
    assert cost.client_per_token == 0
    assert cost.server_per_request == pytest.approx(2000)
    assert cost.engine_per_request == pytest.approx(1000)


@pytest.mark.parametrize(
    "received",
    [(), ((0.0, b"HTTP/1.1 503 Service Unavailable\r\n\r\n"),), ((0.0, b"data: {}\n\ndata: [DONE]\n\n"),)],
)
def test_an_answer_that_is_not_whole_is_a_failure(received):
    with pytest.raises(RuntimeError, match="no whole answer"):
        _refuse_incomplete(Packets(0.0, received, None), 64)
    whole = ((0.0, b"data: {}\n\n" * 64), (0.1, b"data: [DONE]\n\n"))
    _refuse_incomplete(Packets(0.0, whole, None), 64)
    with pytest.raises(RuntimeError, match="broke off"):
        _refuse_incomplete(Packets(0.0, whole, "broke off"), 64)


def test_the_stand_in_says_a_token_when_a_prompt_is_complete(monkeypatch):
    monkeypatch.setattr("benchmarks.paced_server._READ_BYTES", 4096)
    runner = PacedRunner([7, 8, 9], mmap.mmap(-1, 8))

    def step(*rows, **parts):
        return [row.token_ids for row in runner.launch(SchedulerOutput(rows, **parts)).result().rows]

    begins = NewRow(1, 0, (5,) * 10, 10, SamplingParams(max_tokens=5), (0,), 0, 6)
    assert step(begins) == [()]
    assert step(KnownRow(1, (), None, 6, 4)) == [(9,)]
    assert step(KnownRow(1, (), None, 10, 1)) == [(7,)]
    resumed = NewRow(2, 0, (5,) * 12, 10, SamplingParams(max_tokens=5), (0,), 0, 12)
    assert step(resumed, KnownRow(1, (), None, 11, 1), finished_seq_ids=()) == [(8,), (8,)]
