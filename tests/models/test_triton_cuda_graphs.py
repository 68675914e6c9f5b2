"""Graphs of decode steps with the Triton kernels, under the interpreter by way of an emulation of CUDA graphs.

Lists of work go through everything that a replay must bear: a longer batch before, another number of splits, padding,
and entries past a list's end that point nowhere.
"""

import random

import numpy as np
import pytest
import torch

from kernels.attention import triton_backend
from kernels.attention.triton_backend import TritonBackend
from kernels.model_ops.torch_ops import TorchOps
from kernels.model_ops.triton_ops import TritonOps
from models.cuda_graphs import CudaGraphs
from tests.models.decode_steps import EVERYTHING, DecodeSteps, toy_model
from tests.models.recorded_graph import POISONED_INTEGER, CpuGraphRecorder

CPU = torch.device("cpu")
BLOCK_SIZE = 16
MAX_NUM_BLOCKS = 48
MAX_LEN = BLOCK_SIZE * MAX_NUM_BLOCKS
BATCH_SIZES = (1, 2, 4)


class PoisonedLists:
    """A Triton backend whose lists point nowhere past their ends."""

    def __init__(self, backend):
        self.backend = backend
        self.refilled = []  # the lists of each refill

    def for_graph(self, max_num_rows):
        backend = self.backend.for_graph(max_num_rows)
        refill = backend.refill

        def refill_and_poison(query_start_loc: np.ndarray, seq_lens: np.ndarray) -> None:
            refill(query_start_loc, seq_lens)
            self.refilled = list(backend._graph_lists._lists.values())
            for lists in self.refilled:
                for work in (lists.decode, lists.prefill, lists.merges):
                    work.entries[int(work.count) :] = POISONED_INTEGER

        backend.refill = refill_and_poison
        return backend


def make_backend(**choices):
    return TritonBackend(**{"target_programs": 12, "min_split_keys": 64, **choices})


def make_steps(backend, batch_sizes, ops=None, **config):
    """Steps of the toy model, and their graphs."""
    steps = DecodeSteps(toy_model(ops or TorchOps(), CPU, **config), BLOCK_SIZE, num_blocks=4 * MAX_NUM_BLOCKS)
    graphs = CudaGraphs(steps.model, backend, steps.cache, batch_sizes, MAX_NUM_BLOCKS, recorder=CpuGraphRecorder())
    graphs.capture(lambda done, total: None)
    return steps, graphs


@pytest.fixture(scope="module")
def decoding():
    """Steps, their graphs, the backend of the steps without one, and the lists."""
    backend = make_backend()
    lists = PoisonedLists(backend)
    return *make_steps(lists, BATCH_SIZES, **EVERYTHING), backend, lists


@pytest.mark.parametrize(
    ("seq_lens", "is_split"),
    [
        ([MAX_LEN], True),
        ([1], False),
        ([300, 20], True),
        ([20, 30], False),
        ([65, 1, 64, 380], True),
        ([2, 3, 40], False),
        ([MAX_LEN, 130, 17], True),
        ([16, 16, 16, 16], False),
    ],
)
def test_replays_give_what_the_decoder_gives(decoding, seq_lens, is_split):
    """In this order: each step leaves longer or shorter lists behind for the next."""
    steps, graphs, backend, lists = decoding
    steps.compare(graphs, backend, seq_lens, tolerance=1e-5)
    assert any(int(kind.merges.count) for kind in lists.refilled) == is_split


def test_random_steps(decoding):
    steps, graphs, backend, _ = decoding
    rng = random.Random(8)
    for _ in range(4):
        longest = rng.choice([30, 100, 300])
        steps.compare(graphs, backend, [rng.randint(1, longest) for _ in range(rng.randint(1, 4))], tolerance=1e-5)


def test_a_growing_sequence_crosses_tiles_and_splits(decoding):
    steps, graphs, backend, _ = decoding
    for seq_len in (64, 65, 128, 129):
        steps.compare(graphs, backend, [seq_len, 5], tolerance=1e-5)


@pytest.mark.parametrize("seq_lens", [[MAX_LEN, 40, 513], [7, 512]])
def test_batch_invariant_replays_are_the_decoders_to_the_bit(seq_lens, monkeypatch):
    """Padding to a batch size changes no row, and neither does a list that is longer than the step's own."""
    monkeypatch.setattr(triton_backend, "MIN_GRAPH_SEGMENTS", 8)  # room that the interpreter would walk through
    backend = make_backend(target_programs=2, batch_invariant=True)
    steps, graphs = make_steps(backend, [4], TritonOps(batch_invariant=True), **EVERYTHING)
    steps.compare(graphs, backend, seq_lens, tolerance=0)


class OnceFilled:
    """Fills a graph's lists once."""

    def for_graph(self, max_num_rows):
        backend = make_backend().for_graph(max_num_rows)
        refill = backend.refill

        def refill_once(query_start_loc, seq_lens):
            if not hasattr(backend, "is_filled"):
                backend.is_filled = True
                refill(query_start_loc, seq_lens)

        backend.refill = refill_once
        return backend


class StepBackend:
    """Plans each step into lists of its own, which a graph never sees again."""

    def for_graph(self, max_num_rows):
        backend = make_backend()
        backend.refill = lambda query_start_loc, seq_lens: None
        return backend


@pytest.mark.parametrize("fault", [OnceFilled, StepBackend])
def test_lists_that_are_not_refilled_are_noticed(fault):
    steps, graphs = make_steps(fault(), [2])
    with pytest.raises(AssertionError):
        steps.compare(graphs, make_backend(), [70, 3], tolerance=1e-5)
