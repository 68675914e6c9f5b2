"""The vectorised planner against a plain loop, against the properties of a work list, and against its own bounds."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention.planner import DIRECT, PlanSettings, WorkPlan, plan_work
from kernels.attention.tuning import TileConfig

DECODE_TILE, PREFILL_TILE = TileConfig(16, 16, 4, 2), TileConfig(64, 32, 4, 2)

Rows = list[tuple[int, int]]  # query tokens and tokens in the cache

rows_strategy = st.lists(
    st.one_of(st.just(1), st.integers(0, 70)).flatmap(lambda q: st.tuples(st.just(q), st.integers(q, q + 300))),
    max_size=9,
)
windows_strategy = st.none() | st.integers(1, 100)
segments_strategy = st.sampled_from([None, 32, 64])


def settings_of(
    group_size: int = 4,
    window: int | None = None,
    programs: int = 1,
    min_keys: int = 32,
    segment_keys: int | None = None,
    max_segment_slots: int = 4096,
) -> PlanSettings:
    return PlanSettings(
        group_size=group_size,
        num_kv_heads=2,
        sliding_window=window,
        decode_tile=DECODE_TILE,
        prefill_tile=PREFILL_TILE,
        target_programs=programs,
        min_split_keys=min_keys,
        segment_keys=segment_keys,
        max_segment_slots=max_segment_slots,
    )


def plan(rows: Rows, settings: PlanSettings) -> WorkPlan:
    starts = np.cumsum([0] + [query_len for query_len, _ in rows], dtype=np.int32)
    return plan_work(starts, np.array([seq_len for _, seq_len in rows], dtype=np.int32), settings)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def slow_tiles(rows: Rows, settings: PlanSettings, *, decode: bool) -> list[tuple[int, int, int, int, int, int]]:
    """(row, first token, number of tokens, position, key begin, key end) of each query tile of one list."""
    tile = settings.decode_tile if decode else settings.prefill_tile
    tiles = []
    start = 0
    for row, (query_len, seq_len) in enumerate(rows):
        fits = query_len <= settings.decode_tile.query_rows // settings.group_size
        step = tile.query_rows // settings.group_size
        for offset in range(0, query_len if fits == decode and seq_len > 0 else 0, step):
            num_tokens = min(step, query_len - offset)
            position = seq_len - query_len + offset
            window = settings.sliding_window
            first_key = 0 if window is None else max(0, position + 1 - window)
            key_begin = first_key - first_key % tile.keys
            tiles.append((row, start + offset, num_tokens, position, key_begin, position + num_tokens))
        start += query_len
    return tiles


def slow_split(lengths: list[int], tile_keys: int, settings: PlanSettings) -> int:
    """Keys of a split, found by trying one tile more at a time."""
    target = max(1, settings.target_programs // settings.num_kv_heads)
    least = ceil_div(settings.min_split_keys, tile_keys) * tile_keys
    split = least
    while split < max(lengths) and sum(ceil_div(n, split) for n in lengths) > target:
        split += tile_keys
    twice_mean = ceil_div(2 * sum(lengths), len(lengths) * tile_keys) * tile_keys
    return max(least, min(split, twice_mean))


def slow_cuts(tiles: list[tuple[int, ...]], tile_keys: int, settings: PlanSettings) -> list[list[tuple[int, int]]]:
    """The key ranges of each tile's items."""
    if not tiles:
        return []
    lengths = [end - begin for *_, begin, end in tiles]
    split = slow_split(lengths, tile_keys, settings)
    cuts: list[list[tuple[int, int]]] = [[(begin, end)] for *_, begin, end in tiles]
    if settings.segment_keys is None:
        for i, (*_, begin, end) in enumerate(tiles):
            step = ceil_div(ceil_div(lengths[i], ceil_div(lengths[i], split)), tile_keys) * tile_keys
            cuts[i] = [(cut, min(cut + step, end)) for cut in range(begin, end, step)]
        return cuts
    segment = settings.segment_keys
    slots = 0
    for i in sorted(range(len(tiles)), key=lambda i: -lengths[i]):
        _, _, num_tokens, _, begin, end = tiles[i]
        origin = begin - begin % segment
        segments = [(max(begin, cut), min(cut + segment, end)) for cut in range(origin, end, segment)]
        slots += len(segments) * num_tokens
        if lengths[i] > split and slots <= settings.max_segment_slots:
            cuts[i] = segments
    return cuts


@given(
    rows=rows_strategy,
    group_size=st.sampled_from([1, 3, 4, 7, 16]),
    window=windows_strategy,
    programs=st.sampled_from([1, 10, 40, 10_000]),
    segment_keys=segments_strategy,
    max_segment_slots=st.sampled_from([3, 20, 4096]),
)
def test_against_a_plain_loop(
    rows: Rows, group_size: int, window: int | None, programs: int, segment_keys: int | None, max_segment_slots: int
) -> None:
    settings = settings_of(group_size, window, programs, 32, segment_keys, max_segment_slots)
    work = plan(rows, settings)
    slot = 0
    merges = []
    for decode, items in ((True, work.decode_items), (False, work.prefill_items)):
        tiles = slow_tiles(rows, settings, decode=decode)
        tile_keys = (settings.decode_tile if decode else settings.prefill_tile).keys
        expected = []
        for tile, ranges in zip(tiles, slow_cuts(tiles, tile_keys, settings), strict=True):
            num_tokens = tile[2]
            for i, (begin, end) in enumerate(ranges):
                expected.append((*tile[:4], begin, end, slot + i * num_tokens if len(ranges) > 1 else DIRECT, 0))
            if len(ranges) > 1:
                merges += [(tile[1] + i, slot + i, len(ranges), num_tokens) for i in range(num_tokens)]
                slot += len(ranges) * num_tokens
        assert sorted(map(tuple, items.tolist())) == sorted(expected)
    assert sorted(map(tuple, work.merges.tolist())) == sorted(merges)
    assert work.num_slots == slot


@given(rows=rows_strategy, window=windows_strategy, programs=st.sampled_from([1, 40]), segment_keys=segments_strategy)
def test_every_visible_key_is_seen_once(
    rows: Rows, window: int | None, programs: int, segment_keys: int | None
) -> None:
    work = plan(rows, settings_of(window=window, programs=programs, segment_keys=segment_keys))
    starts = np.cumsum([0] + [query_len for query_len, _ in rows])
    seen: dict[int, list[tuple[int, int]]] = {}  # query token -> its key ranges
    for items, tile in ((work.decode_items, DECODE_TILE), (work.prefill_items, PREFILL_TILE)):
        for _, first_token, num_tokens, _, key_begin, key_end, _, _ in items.tolist():
            assert key_begin % tile.keys == 0
            for token in range(first_token, first_token + num_tokens):
                seen.setdefault(token, []).append((key_begin, key_end))
    for row, (query_len, seq_len) in enumerate(rows):
        for i in range(query_len):
            position = seq_len - query_len + i
            ranges = sorted(seen.pop(int(starts[row]) + i))
            assert ranges[0][0] <= (0 if window is None else max(0, position + 1 - window))
            assert position < ranges[-1][1] <= seq_len
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    assert not seen
    assert work.num_planned_tokens == starts[-1]


@given(
    rows=st.lists(
        st.integers(1, 4).flatmap(lambda q: st.tuples(st.just(q), st.just(0) | st.integers(q, 5000))),
        min_size=1,
        max_size=40,
    ),
    window=st.none() | st.integers(1, 3000),
    programs=st.integers(1, 100),
    segment_keys=segments_strategy,
    max_segment_slots=st.integers(1, 60),
)
def test_decode_batches_stay_within_the_bounds(
    rows: Rows, window: int | None, programs: int, segment_keys: int | None, max_segment_slots: int
) -> None:
    """What the lists of a captured graph are sized by."""
    settings = settings_of(4, window, programs, 16, segment_keys, max_segment_slots)
    work = plan(rows, settings)
    assert len(work.prefill_items) == 0
    assert len(work.decode_items) <= settings.max_decode_items(len(rows))
    assert work.num_slots <= settings.max_decode_slots(len(rows), max(query_len for query_len, _ in rows))
    assert len(work.merges) <= sum(query_len for query_len, _ in rows)


def test_the_bound_is_nearly_reached() -> None:
    """One row with nearly all of the keys: cut in half as many splits as there are rows."""
    settings = settings_of(programs=1)
    work = plan([(1, 100_000)] + [(1, 1)] * 39, settings)
    assert 58 <= len(work.decode_items) <= settings.max_decode_items(40) == 60


@given(rows=rows_strategy, segment_keys=segments_strategy)
def test_longest_items_first(rows: Rows, segment_keys: int | None) -> None:
    work = plan(rows, settings_of(programs=40, segment_keys=segment_keys))
    for items in (work.decode_items, work.prefill_items):
        lengths = items[:, 5] - items[:, 4]
        assert (np.diff(lengths) <= 0).all()


def test_no_split_when_the_rows_fill_the_device() -> None:
    work = plan([(1, 1000)] * 8, settings_of(programs=16))
    assert len(work.decode_items) == 8
    assert work.num_slots == 0


def test_one_long_decode_is_split_to_fill_the_device() -> None:
    work = plan([(1, 10_000)], settings_of(programs=64))
    assert 25 <= len(work.decode_items) <= 32  # x 2 KV heads
    assert work.merges.tolist() == [[0, 0, len(work.decode_items), 1]]


def test_a_prefill_leaves_the_decodes_split() -> None:
    decodes = [(1, 10_000)] * 2
    alone = plan(decodes, settings_of(programs=64))
    beside = plan([*decodes, (4000, 4000)], settings_of(programs=64))
    assert len(alone.decode_items) > 20
    np.testing.assert_array_equal(beside.decode_items, alone.decode_items)


def test_one_row_of_100k_does_not_run_alone_at_the_end() -> None:
    """On a device that the other rows fill: no item much longer than the rest."""
    work = plan([(1, 100_000)] + [(1, 2000)] * 64, settings_of(programs=64))
    lengths = work.decode_items[:, 5] - work.decode_items[:, 4]
    assert lengths.max() <= 2 * (100_000 + 64 * 2000) / 65 + DECODE_TILE.keys
    assert len(work.decode_items) <= 65 * 1.5


def test_a_window_bounds_the_work() -> None:
    """Eight windows of 1000 keys are no work for splitting, however long the sequences."""
    work = plan([(1, 100_000)] * 8, settings_of(window=1000, programs=16))
    assert len(work.decode_items) == 8
    assert work.decode_items[:, 4].tolist() == [(100_000 - 1000) // 16 * 16] * 8


def test_no_split_is_shorter_than_the_minimum() -> None:
    work = plan([(1, 1000)], settings_of(programs=10_000, min_keys=250))  # rounded up to 256
    assert sorted(work.decode_items[:, 4].tolist()) == [0, 256, 512, 768]


def test_segments_have_absolute_boundaries() -> None:
    work = plan([(1, 200)], settings_of(window=120, programs=10_000, segment_keys=64))
    assert sorted(work.decode_items[:, 4:6].tolist()) == [[80, 128], [128, 192], [192, 200]]


def test_padding_rows_have_no_items() -> None:
    work = plan([(1, 5), (1, 0), (0, 7)], settings_of())
    assert work.decode_items[:, 0].tolist() == [0]
    assert work.num_planned_tokens == 1


@pytest.mark.parametrize(("query_len", "num_decode_items"), [(1, 1), (4, 1), (5, 0)])
def test_rows_of_few_tokens_take_the_decode_tile(query_len: int, num_decode_items: int) -> None:
    work = plan([(query_len, 50)], settings_of(group_size=4))
    assert len(work.decode_items) == num_decode_items
    assert len(work.prefill_items) == 1 - num_decode_items
