"""The block manager: allocation, sharing, copy-on-write, freeing, and the proof that nothing leaks."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_cache.block_table import BlockTable
from paged_cache.manager import BlockManager, CopyOnWrite
from paged_cache.spec import KVCacheSpec


def test_tables_grow_by_whole_blocks():
    manager = BlockManager(num_blocks=4, block_size=4)
    table = BlockTable()
    assert len(manager.allocate(table, 0, 5).new_block_ids) == 2
    assert manager.allocate(table, 5, 8).new_block_ids == ()
    assert len(manager.allocate(table, 8, 9).new_block_ids) == 1
    manager.check_integrity([table])
    assert manager.num_used_blocks == 3


def test_a_shortage_is_a_return_value_and_changes_nothing():
    manager = BlockManager(num_blocks=2, block_size=4)
    table = BlockTable()
    assert manager.allocate(table, 0, 9) is None
    assert table.block_ids == []
    assert manager.num_free_blocks == 2


def test_a_fork_shares_and_the_first_writer_copies():
    manager = BlockManager(num_blocks=4, block_size=4)
    parent = BlockTable()
    manager.allocate(parent, 0, 6)
    child = manager.fork(parent, 6)
    assert child.block_ids == parent.block_ids
    assert manager.num_used_blocks == 2
    shared = child.block_ids[1]
    allocation = manager.allocate(child, 6, 7)
    assert allocation.copy_on_write == CopyOnWrite(position=1, src=shared, dst=child.block_ids[1])
    assert child.block_ids[0] == parent.block_ids[0]
    assert manager.allocate(parent, 6, 7).copy_on_write is None
    manager.check_integrity([parent, child])


def test_a_fork_at_a_block_edge_copies_nothing():
    manager = BlockManager(num_blocks=4, block_size=4)
    parent = BlockTable()
    manager.allocate(parent, 0, 9)  # a third block stands ready
    child = manager.fork(parent, 8)
    assert len(child) == 2
    allocation = manager.allocate(child, 8, 9)
    assert (allocation.copy_on_write, len(allocation.new_block_ids)) == (None, 1)


def test_copy_on_write_counts_in_a_shortage():
    manager = BlockManager(num_blocks=2, block_size=4)
    parent = BlockTable()
    manager.allocate(parent, 0, 6)
    child = manager.fork(parent, 6)
    before = list(child.block_ids)
    assert manager.allocate(child, 6, 7) is None
    assert child.block_ids == before
    manager.free(parent)
    assert manager.allocate(child, 6, 7).copy_on_write is None
    manager.check_integrity([parent, child])


def test_integrity_sees_a_lost_and_a_doubled_block():
    manager = BlockManager(num_blocks=4, block_size=4)
    table = BlockTable()
    manager.allocate(table, 0, 8)
    with pytest.raises(AssertionError, match="block 0 counts 1 references, 0"):
        manager.check_integrity([])
    with pytest.raises(AssertionError, match="2 block tables hold it"):
        manager.check_integrity([table, BlockTable(list(table.block_ids))])
    with pytest.raises(AssertionError, match="stands twice"):
        manager.check_integrity([BlockTable([0, 0])])


def test_freeing_twice_is_caught():
    manager = BlockManager(num_blocks=1, block_size=4)
    table = BlockTable()
    manager.allocate(table, 0, 1)
    copy = BlockTable(list(table.block_ids))
    manager.free(table)
    with pytest.raises(AssertionError, match="release of free block"):
        manager.free(copy)


@given(
    st.lists(st.tuples(st.sampled_from(["grow", "fork", "free"]), st.integers(0, 9), st.integers(1, 9)), max_size=80)
)
def test_any_sequence_of_calls_keeps_the_pool_whole(calls):
    manager = BlockManager(num_blocks=12, block_size=3)
    tables: list[tuple[BlockTable, int]] = []  # table, tokens written
    for call, pick, amount in calls:
        if call == "fork" and tables:
            table, num_tokens = tables[pick % len(tables)]
            tables.append((manager.fork(table, num_tokens), num_tokens))
        elif call == "free" and tables:
            manager.free(tables.pop(pick % len(tables))[0])
        else:
            position = pick % (len(tables) + 1)
            table, num_tokens = tables[position] if position < len(tables) else (BlockTable(), 0)
            if manager.allocate(table, num_tokens, num_tokens + amount) is not None:
                tables[position : position + 1] = [(table, num_tokens + amount)]
        manager.check_integrity(table for table, _ in tables)
        held = {(t.block_ids[place // 3], place % 3) for t, num_tokens in tables for place in range(num_tokens)}
        assert manager.num_empty_slots(tables) == manager.num_used_blocks * 3 - len(held)
        holders = Counter(block_id for table, _ in tables for block_id in table.block_ids)
        assert manager.num_shared_blocks == sum(count > 1 for count in holders.values())
    for table, num_tokens in tables:
        assert len(table) == manager.num_blocks_for(num_tokens)
        manager.free(table)
    assert manager.num_free_blocks == 12


def test_bytes_per_token_is_the_papers_800_kb_for_opt_13b():
    spec = KVCacheSpec(num_layers=40, num_kv_heads=40, head_dim=128, block_size=16, dtype="float16")
    assert spec.bytes_per_token == 800 * 1024
    assert spec.bytes_per_block == 16 * 800 * 1024
    assert spec.num_blocks_in(spec.bytes_per_block * 3 - 1) == 2
