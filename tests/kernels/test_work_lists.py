"""The lists on their device: exact for a step, of fixed capacity and address for a graph, an overflow told."""

import dataclasses

import numpy as np
import pytest
import torch

from kernels.attention.metadata import AttentionMetadata
from kernels.attention.planner import ITEM_FIELDS, PlanSettings, plan_work
from kernels.attention.tuning import TileConfig
from kernels.attention.work_lists import GraphLists, StepLists, WorkList, WorkLists
from tests.kernels.paged_batches import make_metadata

TILE = TileConfig(16, 16, 4, 2)
SETTINGS = PlanSettings(
    group_size=4,
    num_kv_heads=2,
    sliding_window=None,
    decode_tile=TILE,
    prefill_tile=dataclasses.replace(TILE, query_rows=64),
    target_programs=20,
    min_split_keys=16,
)


def metadata_of(query_lens: list[int], seq_lens: list[int]) -> AttentionMetadata:
    """The planner's part of it; a seq_len of 0 is padding."""
    blocks = [list(range(-(-n // 16))) for n in seq_lens]
    metadata = make_metadata(query_lens, [max(n, 1) for n in seq_lens], [ids or [0] for ids in blocks], 16)
    return dataclasses.replace(metadata, host_seq_lens=np.array(seq_lens, dtype=np.int32))


def real_entries(work_list: WorkList) -> list[list[int]]:
    return work_list.entries[: int(work_list.count)].tolist()


def assert_planned(lists: WorkLists, metadata: AttentionMetadata, settings: PlanSettings = SETTINGS) -> None:
    plan = plan_work(metadata.host_query_start_loc, metadata.host_seq_lens, settings)
    assert real_entries(lists.decode) == plan.decode_items.tolist()
    assert real_entries(lists.prefill) == plan.prefill_items.tolist()
    assert real_entries(lists.merges) == plan.merges.tolist()
    assert lists.num_slots >= plan.num_slots


def test_a_step_has_exact_lists() -> None:
    metadata = metadata_of([1, 1, 30], [200, 3, 50])
    lists = StepLists().lists(metadata, SETTINGS)
    assert_planned(lists, metadata)
    for work_list in (lists.decode, lists.prefill, lists.merges):
        assert work_list.capacity == int(work_list.count) > 0
        assert work_list.entries.data_ptr() % 16 == work_list.count.data_ptr() % 16 == 0
    assert lists.num_planned_tokens == 32


def test_layers_of_one_kind_share_the_lists_of_a_step() -> None:
    step_lists = StepLists()
    first, second = metadata_of([1], [200]), metadata_of([1], [100])
    windowed = dataclasses.replace(SETTINGS, sliding_window=20)
    lists = step_lists.lists(first, SETTINGS)
    assert_planned(step_lists.lists(first, windowed), first, windowed)
    assert step_lists.lists(first, SETTINGS) is lists
    assert_planned(step_lists.lists(second, SETTINGS), second)
    assert step_lists.lists(first, SETTINGS) is not lists  # another batch came between: planned anew


def test_a_step_without_work() -> None:
    lists = StepLists().lists(metadata_of([], []), SETTINGS)
    assert lists.decode.capacity == lists.prefill.capacity == lists.merges.capacity == 0
    assert lists.decode.entries.shape == (0, ITEM_FIELDS)


def test_a_graph_takes_other_lengths_in_the_same_place() -> None:
    graph_lists = GraphLists(3)
    metadata = metadata_of([1, 1, 1], [1, 1, 1])
    lists = graph_lists.lists(metadata, SETTINGS)
    assert_planned(lists, metadata)
    for seq_lens in ([200, 7, 90], [5000, 0, 1], [0, 0, 0]):
        refilled = metadata_of([1, 1, 1], seq_lens)
        graph_lists.refill(refilled.host_query_start_loc, refilled.host_seq_lens)
        assert graph_lists.lists(metadata, SETTINGS) is lists
        assert_planned(lists, refilled)
    assert lists.prefill.capacity == 0
    assert lists.decode.capacity == 10  # 20 programs fill the device, and there are 2 KV heads
    assert lists.merges.capacity == 3


def test_a_layer_that_comes_late_has_the_lengths_last_refilled() -> None:
    graph_lists = GraphLists(2)
    first, second = metadata_of([1, 1], [1, 1]), metadata_of([1, 1], [300, 40])
    windowed = dataclasses.replace(SETTINGS, sliding_window=100)
    graph_lists.lists(first, SETTINGS)
    seq_lens = second.host_seq_lens.copy()
    graph_lists.refill(second.host_query_start_loc, seq_lens)
    seq_lens[:] = 7  # the caller's array is its own again
    assert_planned(graph_lists.lists(first, windowed), second, windowed)
    refilled = metadata_of([1, 1], [20, 500])
    graph_lists.refill(refilled.host_query_start_loc, refilled.host_seq_lens)
    assert_planned(graph_lists.lists(first, SETTINGS), refilled)
    assert_planned(graph_lists.lists(first, windowed), refilled, windowed)


def test_rows_of_another_number_do_not_fit() -> None:
    graph_lists = GraphLists(3)
    with pytest.raises(AssertionError, match="2 rows in a graph of 3"):
        graph_lists.refill(np.array([0, 1, 2], dtype=np.int32), np.array([5, 5], dtype=np.int32))


def test_an_overflow_is_told() -> None:
    """Rows of many query tokens need the prefill tile, for which a decode graph has no list."""
    graph_lists = GraphLists(1)
    graph_lists.lists(metadata_of([1], [1]), SETTINGS)
    with pytest.raises(AssertionError, match="6 prefill items in a list of fixed capacity 0"):
        graph_lists.refill(np.array([0, 40], dtype=np.int32), np.array([40], dtype=np.int32))


def test_a_poisoned_tail_is_not_in_a_list() -> None:
    metadata = metadata_of([1, 1], [3, 3])
    lists = GraphLists(2).lists(metadata, SETTINGS)
    for work_list in (lists.decode, lists.merges):
        work_list.entries[int(work_list.count) :] = torch.iinfo(torch.int32).max
    assert_planned(lists, metadata)
