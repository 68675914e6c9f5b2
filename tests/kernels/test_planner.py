"""The vectorised planner against the properties that a work list must have, and against a plain loop's tiles."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention.planner import DIRECT, PlanSettings, WorkPlan, plan_work
from kernels.attention.tuning import TileConfig

DECODE_TILE, PREFILL_TILE = TileConfig(16, 16, 4, 2), TileConfig(64, 32, 4, 2)

rows_strategy = st.lists(
    st.one_of(st.just(1), st.integers(0, 70)).flatmap(lambda q: st.tuples(st.just(q), st.integers(q, q + 300))),
    max_size=9,
)


def plan(
    rows: list[tuple[int, int]], group_size: int = 4, window: int | None = None, programs: int = 1, min_keys: int = 32
) -> WorkPlan:
    return plan_work(
        np.cumsum([0] + [query_len for query_len, _ in rows], dtype=np.int32),
        np.array([seq_len for _, seq_len in rows], dtype=np.int32),
        PlanSettings(
            group_size=group_size,
            num_kv_heads=2,
            sliding_window=window,
            decode_tile=DECODE_TILE,
            prefill_tile=PREFILL_TILE,
            target_programs=programs,
            min_split_keys=min_keys,
        ),
    )


@given(
    rows=rows_strategy,
    group_size=st.sampled_from([1, 3, 4, 7, 16]),
    window=st.none() | st.integers(1, 100),
    programs=st.sampled_from([1, 40, 10_000]),
)
def test_every_visible_key_is_seen_once(
    rows: list[tuple[int, int]], group_size: int, window: int | None, programs: int
) -> None:
    work = plan(rows, group_size, window, programs)
    starts = np.cumsum([0] + [query_len for query_len, _ in rows])
    seen: dict[int, list[tuple[int, int, int]]] = {}  # query token -> its key ranges and their slots
    slots = []
    for items, tile in ((work.decode_items, DECODE_TILE), (work.prefill_items, PREFILL_TILE)):
        for row, first_token, num_tokens, position, key_begin, key_end, slot, _ in items.tolist():
            query_len, seq_len = rows[row]
            assert 1 <= num_tokens <= tile.query_rows // group_size
            assert starts[row] <= first_token < first_token + num_tokens <= starts[row + 1]
            assert position == seq_len - query_len + first_token - starts[row]
            assert key_begin % tile.keys == 0
            assert key_begin < key_end <= position + num_tokens
            for i in range(num_tokens):
                seen.setdefault(first_token + i, []).append((key_begin, key_end, slot + i if slot != DIRECT else slot))
                slots += [slot + i] if slot != DIRECT else []
    assert sorted(slots) == list(range(work.num_slots))

    merges = {token: (first, count, stride) for token, first, count, stride in work.merges.tolist()}
    assert len(merges) == len(work.merges)
    for row, (query_len, seq_len) in enumerate(rows):
        for i in range(query_len):
            token, position = int(starts[row]) + i, seq_len - query_len + i
            ranges = sorted(seen.pop(token))
            first_key = 0 if window is None else max(0, position + 1 - window)
            assert ranges[0][0] <= first_key
            assert ranges[-1][1] > position
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
            if len(ranges) == 1:
                assert ranges[0][2] == DIRECT
                assert token not in merges
            else:
                first, count, stride = merges.pop(token)
                assert [slot for _, _, slot in ranges] == [first + n * stride for n in range(count)]
    assert not seen
    assert not merges
    assert work.num_planned_tokens == starts[-1]


@given(rows=rows_strategy)
def test_longest_items_first(rows: list[tuple[int, int]]) -> None:
    work = plan(rows, programs=40)
    for items in (work.decode_items, work.prefill_items):
        lengths = items[:, 5] - items[:, 4]
        assert (np.diff(lengths) <= 0).all()


def test_no_split_when_the_rows_fill_the_device() -> None:
    work = plan([(1, 1000)] * 8, programs=16)
    assert len(work.decode_items) == 8
    assert work.num_slots == 0


def test_one_long_decode_is_split_to_fill_the_device() -> None:
    work = plan([(1, 10_000)], programs=64)
    assert 25 <= len(work.decode_items) <= 32  # x 2 KV heads
    assert work.merges.tolist() == [[0, 0, len(work.decode_items), 1]]


def test_no_split_is_shorter_than_the_minimum() -> None:
    work = plan([(1, 1000)], programs=10_000, min_keys=250)  # rounded up to 256
    assert sorted(work.decode_items[:, 4].tolist()) == [0, 256, 512, 768]


def test_padding_rows_have_no_items() -> None:
    work = plan([(1, 5), (1, 0), (0, 7)])
    assert work.decode_items[:, 0].tolist() == [0]
    assert work.num_planned_tokens == 1


@pytest.mark.parametrize(("query_len", "num_decode_items"), [(1, 1), (4, 1), (5, 0)])
def test_rows_of_few_tokens_take_the_decode_tile(query_len: int, num_decode_items: int) -> None:
    work = plan([(query_len, 50)], group_size=4)
    assert len(work.decode_items) == num_decode_items
    assert len(work.prefill_items) == 1 - num_decode_items
