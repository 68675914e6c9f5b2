"""Blocks that are moved to the host and back: where they stand meanwhile, and that every byte of them comes back."""

import dataclasses

import numpy as np
import pytest
import torch

from paged_cache import kv_cache
from paged_cache.block_table import BlockTable
from paged_cache.kv_cache import KVCache
from paged_cache.manager import BlockManager, BlockMove
from tests.paged_cache.test_kv_cache import NUM_BLOCKS, SPEC, tensors_of

NUM_HOST_BLOCKS = 6


def swapped_out(num_host_blocks: int = 8) -> tuple[BlockManager, BlockTable, tuple[BlockMove, ...]]:
    """A sequence of ten tokens, with a block ready for more, on the host."""
    manager = BlockManager(8, 4, num_host_blocks=num_host_blocks)
    table = BlockTable()
    manager.allocate(table, 0, 13)
    return manager, table, manager.swap_out(table, 10)


def test_a_table_changes_places():
    manager, table, moves = swapped_out()
    assert [move.src for move in moves] == [0, 1, 2], "the block without tokens stays behind"
    assert (table.block_ids, table.host_block_ids) == ([], [move.dst for move in moves])
    assert (manager.num_used_blocks, manager.num_used_host_blocks) == (0, 3)
    manager.check_integrity([table])
    manager.allocate(table, 0, 10)
    assert manager.swap_in(table, 0) == tuple(
        BlockMove(move.dst, block_id) for move, block_id in zip(moves, table.block_ids, strict=True)
    )
    assert (manager.num_used_blocks, manager.num_used_host_blocks) == (3, 0)
    manager.check_integrity([table])


def test_what_is_cached_by_now_is_not_moved():
    manager, table, moves = swapped_out()
    cached, prefix = BlockTable(), manager.new_prefix()
    prefix.extend(range(8))
    manager.allocate(cached, 0, 8)
    manager.register(cached, prefix, 8)
    manager.share_prefix(table, manager.find_prefix(prefix, 9))
    manager.allocate(table, 8, 10)
    assert manager.swap_in(table, 2) == (BlockMove(moves[2].dst, table.block_ids[2]),)
    assert manager.num_used_host_blocks == 0
    manager.check_integrity([table, cached])


def test_too_few_host_blocks_are_a_return_value_and_change_nothing():
    manager, table, moves = swapped_out(num_host_blocks=2)
    assert moves is None
    assert len(table) == 4
    assert manager.num_used_host_blocks == 0
    manager.check_integrity([table])


def test_a_swapped_out_table_is_freed_with_its_host_blocks():
    manager, table, _ = swapped_out()
    manager.free(table)
    assert (table, manager.num_used_host_blocks) == (BlockTable(), 0)
    manager.check_integrity([])


def test_integrity_sees_a_lost_host_block():
    manager, table, _ = swapped_out()
    with pytest.raises(AssertionError, match="counts 1 references, 0"):
        manager.check_integrity([BlockTable(table.block_ids)])
    with pytest.raises(AssertionError, match="stands in two tables"):
        manager.check_integrity([table, BlockTable(host_block_ids=list(table.host_block_ids))])


def random_cache(spec) -> KVCache:
    cache = KVCache(spec, NUM_BLOCKS, torch.device("cpu"), NUM_HOST_BLOCKS)
    for layer in cache.layers:
        for tensor in tensors_of(layer):
            tensor.random_(0, 256)
    return cache


def bytes_of(cache: KVCache) -> list[torch.Tensor]:
    return [tensor.clone() for layer in cache.layers for tensor in tensors_of(layer)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    "host_ids", [[0, 1, 2, 3], [5, 4, 1, 0], [1, 2, 0, 5]], ids=["one run", "no runs", "a run among others"]
)
@pytest.mark.parametrize("num_at_once", [1, 2, 3, 100])
def test_every_byte_comes_back_to_another_block(monkeypatch, dtype, host_ids, num_at_once):
    """Keys, values and scales of all layers; whatever is not moved stays as it is."""
    spec = dataclasses.replace(SPEC, dtype=dtype)
    monkeypatch.setattr(kv_cache, "MAX_COPY_BYTES", num_at_once * spec.bytes_per_block)
    cache = random_cache(spec)
    before = bytes_of(cache)
    src, dst = [7, 2, 0, 3], [1, 7, 8, 2]
    cache.swap_out(np.array([*zip(src, host_ids, strict=True)]))
    assert all(torch.equal(now, then) for now, then in zip(bytes_of(cache), before, strict=True))
    for layer in cache.layers:
        for tensor in tensors_of(layer):
            tensor[src] = 99
    cache.swap_in(np.array([*zip(host_ids, dst, strict=True)]))
    for now, then in zip(bytes_of(cache), before, strict=True):
        expected = then.clone()
        expected[src] = 99
        expected[dst] = then[src]
        assert torch.equal(now, expected)


def test_host_blocks_take_the_bytes_of_blocks():
    spec = dataclasses.replace(SPEC, dtype="int8")
    cache = random_cache(spec)
    assert sum(words.nbytes for words in cache._host_words) == NUM_HOST_BLOCKS * spec.bytes_per_block
    assert KVCache(spec, NUM_BLOCKS, torch.device("cpu")).num_host_blocks == 0
