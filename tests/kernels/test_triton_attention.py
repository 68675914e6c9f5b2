"""What only the Triton attention has: tiles of any size, split decodes beside prefills, batch invariance, graphs."""

import dataclasses

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kernels.attention import triton_backend
from kernels.attention.metadata import AttentionParams
from kernels.attention.triton_backend import LayerShape, TritonBackend, TritonGraphBackend
from kernels.attention.tuning import DEFAULT_ARCH, KINDS, TileConfig, TileRow, TileTable
from kernels.attention.work_lists import WorkList
from tests.kernels.paged_batches import (
    TOLERANCES,
    PagedBatch,
    Shape,
    make_batch,
    oracle,
    quantise_batch,
    relative_error,
    requery,
    spread_blocks,
)

SMALL = Shape(4, 2, 16, 16)
PARAMS = AttentionParams(scale=0.25)
NO_SPLIT, ALWAYS_SPLIT = 1, 1 << 20  # target_programs
POISON = 1 << 30
SEGMENT_KEYS = 32


def tiles_of(query_rows: int, keys: int) -> TileTable:
    """A table of one configuration for everything."""
    config = TileConfig(query_rows, keys, num_warps=4, num_stages=2)
    dtypes = ("float16", "float32", "int8", "float8_e4m3fn")
    return TileTable(TileRow(DEFAULT_ARCH, 256, None, kind, dtype, config, "") for kind in KINDS for dtype in dtypes)


def attend(backend: TritonBackend | TritonGraphBackend, batch: PagedBatch, params: AttentionParams) -> torch.Tensor:
    return backend.attend(batch.query, batch.kv_layer, batch.metadata, params)


TILES = [(16, 16), (16, 32), (32, 64), (64, 128), (128, 32)]


@pytest.mark.parametrize("target_programs", [NO_SPLIT, ALWAYS_SPLIT])
@pytest.mark.parametrize(
    ("query_rows", "keys", "sliding_window"),
    [
        *((*tile, None if i % 2 else 25) for i, tile in enumerate(TILES)),
        *(pytest.param(*tile, 25 if i % 2 else None, marks=pytest.mark.full) for i, tile in enumerate(TILES)),
    ],
)
def test_tiles(query_rows: int, keys: int, sliding_window: int | None, target_programs: int) -> None:
    """Tiles smaller than a block, as large, and larger; the 2 tokens of 96 and the 32 of 128 end at a tile's edge."""
    batch = make_batch(Shape(6, 2, 16, 32), [1, 2, 9, 32], [70, 96, 33, 128], seed=1)
    backend = TritonBackend(target_programs, min_split_keys=1, tiles=tiles_of(query_rows, keys))
    params = dataclasses.replace(PARAMS, sliding_window=sliding_window)
    assert relative_error(attend(backend, batch, params), oracle(batch, params)) < TOLERANCES[torch.float32]


def test_offsets_past_two_to_the_31() -> None:
    """Blocks so far apart that all but the first twelve begin past 2^31 elements."""
    shape = dataclasses.replace(SMALL, dtype=torch.float16)
    batch = make_batch(shape, [1, 3], [70, 80], seed=2)
    expected = oracle(batch, PARAMS)
    spread = spread_blocks(batch, (1 << 31) // 24)
    assert int(batch.metadata.block_tables[:, :5].max()) > 12
    for keys in (16, 32):
        out = attend(TritonBackend(NO_SPLIT, tiles=tiles_of(16, keys)), spread, PARAMS)
        assert relative_error(out, expected) < TOLERANCES[torch.float16]


def test_a_prefill_does_not_keep_decodes_from_being_split(monkeypatch: pytest.MonkeyPatch) -> None:
    merged = []
    launch = triton_backend._launch_merges

    def record(merges: WorkList, *args: object) -> None:
        merged.extend(merges.entries[:, 0].tolist())
        launch(merges, *args)

    monkeypatch.setattr(triton_backend, "_launch_merges", record)
    batch = make_batch(SMALL, [1, 100], [200, 100], seed=3)
    out = attend(TritonBackend(8, min_split_keys=32, tiles=tiles_of(32, 32)), batch, PARAMS)
    assert merged == [0]
    assert relative_error(out, oracle(batch, PARAMS)) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("seq_len", [33, 64])
def test_a_last_split_of_one_key(seq_len: int) -> None:
    """And one of a whole tile; the windows of later tokens leave the first split unseen."""
    batch = make_batch(SMALL, [1, 7], [seq_len, seq_len], seed=4)
    backend = TritonBackend(ALWAYS_SPLIT, min_split_keys=1, tiles=tiles_of(16, 16))
    for sliding_window in (None, 3, 20):
        params = dataclasses.replace(PARAMS, sliding_window=sliding_window)
        assert relative_error(attend(backend, batch, params), oracle(batch, params)) < TOLERANCES[torch.float32]


@pytest.fixture
def row_independent_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that round a row alike wherever it stands in its tile: matrix units do, the host's BLAS does not."""

    def dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *options: object
    ) -> TensorHandle:
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None].astype(np.float32) * b.data[None, k, :].astype(np.float32)
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "SEGMENT_KEYS", SEGMENT_KEYS)
    monkeypatch.setattr(triton_backend, "MIN_GRAPH_SEGMENTS", 8)


def invariant_backend(target_programs: int) -> TritonBackend:
    return TritonBackend(target_programs, min_split_keys=1, batch_invariant=True, tiles=tiles_of(32, 16))


INVARIANCE = [
    (torch.float32, None),
    (torch.bfloat16, 40),
    pytest.param(torch.float32, 40, marks=pytest.mark.full),
    pytest.param(torch.bfloat16, None, marks=pytest.mark.full),
    pytest.param(torch.int8, 40, marks=pytest.mark.full),
]


@pytest.mark.usefixtures("short_segments", "row_independent_dot")
@pytest.mark.parametrize(("dtype", "sliding_window"), INVARIANCE, ids=str)
def test_batch_invariance(dtype: torch.dtype, sliding_window: int | None) -> None:
    """Bitwise the same alone, among others, in chunks, token by token, split or not, and in a graph."""
    is_quantised = dtype == torch.int8
    shape = Shape(3, 1, 16, 16, torch.float32 if is_quantised else dtype)
    batch = exact = make_batch(shape, [75, 40], [75, 40], seed=5)
    if is_quantised:
        batch, exact = quantise_batch(batch, dtype)
    params = dataclasses.replace(PARAMS, sliding_window=sliding_window)
    unsplit, split = invariant_backend(NO_SPLIT), invariant_backend(ALWAYS_SPLIT)
    expected = attend(unsplit, batch, params)
    assert relative_error(expected, oracle(exact, params)) < TOLERANCES[shape.dtype]
    first, second = expected[:75], expected[75:]
    # Other tiles: alone and whole, in chunks that begin and end anywhere, and decodes beside a chunk.
    assert torch.equal(attend(split, requery(batch, [0], [75], [75]), params), first)
    chunks = [attend(unsplit, requery(batch, [0], [q], [n]), params) for q, n in ((23, 23), (41, 64), (11, 75))]
    assert torch.equal(torch.cat(chunks), first)
    positions = [0, 15, 31, 32, 63, 64, 74]
    rows, query_lens = [0] * 7 + [1, 1], [1] * 8 + [13]
    step = requery(batch, rows, query_lens, [p + 1 for p in positions] + [33, 40])
    for backend in (unsplit, split):
        mixed = attend(backend, step, params)
        assert torch.equal(mixed[:7], first[positions])
        assert torch.equal(mixed[7:], second[[32, *range(27, 40)]])
    step = requery(batch, [0, 1, 0], [1, 1, 1], [75, 33, 64])
    graph = attend(invariant_backend(8).for_graph(3), step, params)
    assert torch.equal(graph, torch.stack([first[74], second[32], first[63]]))


@pytest.mark.parametrize("group_size", [1, 4, 9, 32])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_batch_invariance_takes_one_tile(arch: str, group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length of the query: two tiles may sum in two orders, which no interpreter shows."""
    monkeypatch.setattr(triton_backend, "arch_of", lambda device: arch)
    shape = LayerShape(2 * group_size, 2, 128, None, "bfloat16")
    settings = TritonBackend(264, batch_invariant=True).settings(shape, torch.device("cpu"))
    assert settings.decode_tile == settings.prefill_tile
    assert settings.decode_tile == TileTable.load().lookup(arch, 128, group_size, "invariant", "bfloat16")
    assert settings.segment_keys == triton_backend.SEGMENT_KEYS
    assert settings.segment_keys % settings.decode_tile.keys == 0


@pytest.mark.usefixtures("short_segments")
def test_the_order_of_merging_shows() -> None:
    """What the invariance tests compare is sensitive: the ordinary mode does differ from split to split."""
    batch = make_batch(Shape(3, 1, 16, 16), [20], [75], seed=6)
    outs = [
        attend(TritonBackend(n, min_split_keys=1, tiles=tiles_of(16, 16)), batch, PARAMS)
        for n in (NO_SPLIT, ALWAYS_SPLIT)
    ]
    assert not torch.equal(*outs)


def poison_padding(graph: TritonGraphBackend) -> None:
    """Fill what lies past the counts of a graph's lists."""
    for lists in graph._graph_lists._lists.values():
        for work_list in (lists.decode, lists.prefill, lists.merges):
            work_list.entries[int(work_list.count) :] = POISON


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.usefixtures("short_segments")
def test_graph_lists(batch_invariant: bool) -> None:
    """One set of lists for steps of changing lengths, padding rows among them, poisoned past its ends."""
    batch = make_batch(SMALL, [150, 90], [150, 90], seed=7)
    backend = TritonBackend(16, min_split_keys=16, batch_invariant=batch_invariant, tiles=tiles_of(16, 16))
    graph = backend.for_graph(3)
    addresses = set()
    for seq_lens in ([1, 1, 1], [150, 90, 0], [3, 0, 0], [0, 0, 0], [150, 90, 150]):
        step = requery(batch, [0, 1, 0], [1, 1, 1], [max(n, 1) for n in seq_lens])
        lens = np.array(seq_lens, dtype=np.int32)
        metadata = dataclasses.replace(step.metadata, seq_lens=torch.from_numpy(lens), host_seq_lens=lens)
        step = dataclasses.replace(step, metadata=metadata)
        graph.refill(metadata.host_query_start_loc, lens)
        poison_padding(graph)
        out = attend(graph, step, PARAMS)
        is_padding = torch.from_numpy(lens == 0)
        assert torch.equal(out[is_padding], torch.zeros_like(out[is_padding]))
        if not is_padding.all():
            assert relative_error(out, oracle(step, PARAMS)) < TOLERANCES[torch.float32]
        lists = next(iter(graph._graph_lists._lists.values()))
        addresses.add((lists.decode.entries.data_ptr(), lists.merges.entries.data_ptr(), lists.decode.capacity))
    assert len(addresses) == 1


def test_graph_of_several_query_tokens() -> None:
    """The rows of speculative verification: as many tokens as a decode tile holds."""
    batch = make_batch(SMALL, [120], [120], seed=8)
    graph = TritonBackend(16, min_split_keys=16, tiles=tiles_of(16, 16)).for_graph(2)
    step = requery(batch, [0, 0], [3, 1], [120, 60])
    assert relative_error(attend(graph, step, PARAMS), oracle(step, PARAMS)) < TOLERANCES[torch.float32]
