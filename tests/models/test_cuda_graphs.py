"""Graphs of decode steps, on CPU tensors by way of an emulation of CUDA graphs, and on a GPU where there is one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.backend import select_backend
from kernels.model_ops.torch_ops import TorchOps
from models.cuda_graphs import MAX_BATCH_SIZE, CudaGraphs, graph_batch_sizes
from models.graph_recorder import CudaGraphRecorder
from models.runner import ModelRunner
from paged_cache.manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from tests.models.decode_steps import EVERYTHING, DecodeSteps, toy_model
from tests.models.recorded_graph import CpuGraphRecorder

CPU = torch.device("cpu")
BLOCK_SIZE = 4
MAX_NUM_BLOCKS = 16
BATCH_SIZES = (1, 2, 4)


class ListedBackend:
    """A CPU backend whose list of work is the rows' lengths; its calls are recorded whole."""

    name = "listed"

    def __init__(self, recorder, num_rows=None):
        self.backend = select_backend("auto", CPU)
        self.recorder = recorder
        self.lengths = None if num_rows is None else torch.zeros(num_rows, dtype=torch.int32)

    def for_graph(self, max_num_rows):
        return type(self)(self.recorder, max_num_rows)

    def refill(self, query_start_loc, seq_lens):
        assert query_start_loc.tolist() == list(range(len(self.lengths) + 1))
        self.lengths.copy_(torch.from_numpy(seq_lens))

    def rotate_and_write(self, heads, rotation, kv_layer, metadata):
        return self.recorder.opaque(lambda: self.backend.rotate_and_write(heads, rotation, kv_layer, metadata))

    def attend(self, query, kv_layer, metadata, params):
        def attend():
            assert torch.equal(metadata.seq_lens, self.lengths)
            return self.backend.attend(query, kv_layer, replace(metadata, seq_lens=self.lengths), params)

        return self.recorder.opaque(attend)


def make_graphs(steps, backend_type=ListedBackend, recorder=None, batch_sizes=BATCH_SIZES):
    recorder = recorder or CpuGraphRecorder()
    return CudaGraphs(steps.model, backend_type(recorder), steps.cache, batch_sizes, MAX_NUM_BLOCKS, recorder=recorder)


def captured(steps, **choices):
    graphs = make_graphs(steps, **choices)
    graphs.capture(lambda done, total: None)
    return graphs


def make_steps(seed=0, **config):
    return DecodeSteps(toy_model(TorchOps(), CPU, **config), BLOCK_SIZE, num_blocks=80, seed=seed)


@pytest.fixture(scope="module")
def plain():
    steps = make_steps()
    return steps, captured(steps)


@pytest.fixture(scope="module")
def every_step():
    steps = make_steps(**EVERYTHING)
    return steps, captured(steps)


step_lens = st.lists(st.integers(1, MAX_NUM_BLOCKS * BLOCK_SIZE), min_size=1, max_size=max(BATCH_SIZES))


@settings(max_examples=15, deadline=None)
@given(steps_lens=st.lists(step_lens, min_size=2, max_size=4))
@pytest.mark.parametrize("model", ["plain", "every_step"])
def test_replays_give_what_the_decoder_gives(model, steps_lens, request):
    steps, graphs = request.getfixturevalue(model)
    for seq_lens in steps_lens:
        steps.compare(graphs, select_backend("auto", CPU), seq_lens, tolerance=1e-5)


def test_a_short_batch_after_a_long_one_leaves_no_trace(plain):
    steps, graphs = plain
    for seq_lens in ([64, 64, 64, 64], [1, 2, 3], [64, 1, 64, 1], [5], [64, 3], [1]):
        steps.compare(graphs, select_backend("auto", CPU), seq_lens, tolerance=1e-5)


def test_padding_rows_are_inert(plain):
    steps, graphs = plain
    batch = steps.batch([9, 17, 3])
    graphs.run(batch)
    static = graphs._graphs[4].batch
    assert static.input_ids.tolist() == [*batch.input_ids.tolist(), 0]
    assert static.positions.tolist() == [8, 16, 2, 0]
    assert static.attn.seq_lens.tolist() == [9, 17, 3, 0]
    assert static.attn.slot_mapping.tolist() == [*batch.attn.slot_mapping.tolist(), -1]
    assert static.attn.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert graphs._hidden[:4].isfinite().all() and graphs._logits[:4].isfinite().all()


class RowCountingRecorder(CpuGraphRecorder):
    def __init__(self):
        super().__init__()
        self.num_rows = []  # of each graph, in the order of recording

    def record(self, work):
        graph = super().record(work)
        self.num_rows.append(max(len(x) for x in graph.made if x.shape[1:] == (32,)))
        return graph


def test_capturing_leaves_the_cache_alone_and_goes_from_the_largest():
    steps = make_steps()
    for data in steps.cached:
        data.copy_(torch.randn(data.shape))
    before = [data.clone() for data in steps.cached]
    progress = []
    recorder = RowCountingRecorder()
    graphs = make_graphs(steps, recorder=recorder, batch_sizes=[2, 8, 2, 1])
    graphs.capture(lambda done, total: progress.append((done, total)))
    assert progress == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert recorder.num_rows == [8, 2, 1]
    assert all(torch.equal(data, old) for data, old in zip(steps.cached, before, strict=True))


def test_other_steps_are_left_to_the_caller(plain):
    steps, graphs = plain
    decodes = steps.batch([5, 6])
    assert graphs.run(decodes) is not None
    assert graphs.run(replace(decodes, logits_indices=decodes.logits_indices[:1])) is None
    assert graphs.run(steps.batch([5, 6], [1, 2])) is None
    assert graphs.run(steps.batch([1, 2, 3, 4, 5])) is None
    assert make_graphs(steps).run(decodes) is None  # nothing captured yet


def test_the_smallest_graph_that_fits_is_replayed():
    steps = make_steps()
    graphs = captured(steps)
    replayed = []
    for size, graph in graphs._graphs.items():
        graph.recorded.steps.append(lambda size=size: replayed.append(size))
    for num_rows in (1, 2, 3, 4):
        graphs.run(steps.batch([7] * num_rows))
    assert replayed == [1, 2, 4, 4]


def test_a_runner_with_graphs_gives_the_same_tokens():
    def served(with_graphs):
        steps = make_steps()
        backend = ListedBackend(CpuGraphRecorder())
        graphs = captured(steps) if with_graphs else None
        replays = []
        if graphs is not None:
            run = graphs.run
            graphs.run = lambda batch: replays.append(result := run(batch)) or result
        limits = {"max_num_seqs": 6, "max_model_len": MAX_NUM_BLOCKS * BLOCK_SIZE}
        scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=16, **limits), BlockManager(steps.cache.num_blocks, BLOCK_SIZE)
        )
        runner = ModelRunner(steps.model, backend.backend, steps.cache, **limits, graphs=graphs)
        for i in range(6):
            params = SamplingParams(temperature=i % 2, seed=i, max_tokens=6 + 4 * i, logprobs=2, prompt_logprobs=0)
            scheduler.add(Request(f"r{i}", tuple(range(1, 8 + i)), params, 0.0))
        tokens = {}
        while scheduler.has_unfinished:
            output = scheduler.schedule()
            for update in scheduler.update(output, runner.execute(output)):
                tokens.setdefault(update.request_id, []).extend(update.token_ids)
        return tokens, replays

    expected, _ = served(with_graphs=False)
    tokens, replays = served(with_graphs=True)
    assert tokens == expected
    assert any(result is None for result in replays) and sum(result is not None for result in replays) > 5


# --- the comparison notices ---


class StaleLists(ListedBackend):
    def refill(self, query_start_loc, seq_lens):
        if not self.lengths.any():
            super().refill(query_start_loc, seq_lens)


class BakedLengths(ListedBackend):
    def attend(self, query, kv_layer, metadata, params):
        lengths = torch.from_numpy(metadata.host_seq_lens.copy())
        return self.recorder.opaque(
            lambda: self.backend.attend(query, kv_layer, replace(metadata, seq_lens=lengths), params)
        )


class WritesPadding(ListedBackend):
    def rotate_and_write(self, heads, rotation, kv_layer, metadata):
        slots = metadata.slot_mapping.clamp(min=0)
        return super().rotate_and_write(heads, rotation, kv_layer, replace(metadata, slot_mapping=slots))


@pytest.mark.parametrize("fault", [StaleLists, BakedLengths, WritesPadding])
def test_a_backend_that_ignores_the_rules_is_noticed(fault):
    steps = make_steps()
    graphs = captured(steps, backend_type=fault)
    with pytest.raises(AssertionError):
        for seq_lens in ([9, 17, 3], [2, 2, 2]):
            steps.compare(graphs, select_backend("auto", CPU), seq_lens, tolerance=1e-5)


@pytest.mark.parametrize("name", ["input_ids", "positions", "block_tables"])
def test_an_input_that_is_not_copied_is_noticed(name):
    """Each input matters: with that one kept from the step before, the results differ."""
    steps = make_steps()
    graphs = captured(steps)
    first = steps.batch([9, 17, 3])
    kept = graphs._fill

    def fill(graph, batch):
        if hasattr(batch, name):
            batch = replace(batch, **{name: getattr(first, name)})
        else:
            old = torch.zeros_like(batch.attn.block_tables)
            batch = replace(batch, attn=replace(batch.attn, block_tables=old))
        kept(graph, batch)

    graphs._fill = fill
    with pytest.raises(AssertionError):
        steps.compare(graphs, select_backend("auto", CPU), [10, 18, 4], tolerance=1e-5)


# --- which sizes ---


@given(max_num_seqs=st.integers(1, 3 * MAX_BATCH_SIZE))
def test_batch_sizes_hold_every_batch_with_little_padding(max_num_seqs):
    sizes = graph_batch_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1
    assert sizes[-1] == min(max_num_seqs, MAX_BATCH_SIZE)
    for smaller, size in zip([0, *sizes], sizes, strict=False):
        padding = size - (smaller + 1)
        assert padding <= 7 if size <= 64 else padding <= size / 5


# --- on a GPU ---


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_gpu(dtype):
    device = torch.device("cuda")
    backend = select_backend("triton", device)
    steps = DecodeSteps(toy_model(TorchOps(), device, dtype, **EVERYTHING), block_size=16, num_blocks=2200)
    graphs = CudaGraphs(
        steps.model, backend, steps.cache, [1, 2, 4, 8], max_num_blocks=256, recorder=CudaGraphRecorder(device)
    )
    graphs.capture(lambda done, total: None)
    lengths = np.random.default_rng(3).integers(1, 4000, size=(6, 8)).tolist()
    tolerance = 1e-4 if dtype == torch.float32 else 6e-2  # products of other sizes round otherwise
    for seq_lens in ([4000] * 4, [1], [17, 1, 900], [64] * 8, *(row[: i + 2] for i, row in enumerate(lengths))):
        steps.compare(graphs, backend, seq_lens, tolerance)
