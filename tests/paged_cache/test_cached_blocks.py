"""Cached prefixes: what is shared, what is evicted first, and that nobody ever reads another one's tokens."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_cache.block_table import BlockTable
from paged_cache.manager import BlockManager
from paged_cache.prefix_cache import BlockKey, TokenPrefix
from tests.paged_cache.written_blocks import WrittenBlocks

SIZE = 4


def prompt(manager: BlockManager, tokens, *salts) -> tuple[BlockTable, TokenPrefix]:
    """A sequence with all its tokens computed and registered, without what is cached."""
    table, prefix = BlockTable(), manager.new_prefix(*salts)
    prefix.extend(tokens)
    assert manager.allocate(table, 0, len(tokens)) is not None
    manager.register(table, prefix, len(tokens))
    return table, prefix


def lookup(manager: BlockManager, tokens, *salts, max_tokens: int | None = None):
    prefix = manager.new_prefix(*salts)
    prefix.extend(tokens)
    return manager.find_prefix(prefix, len(tokens) if max_tokens is None else max_tokens)


def test_blocks_of_a_running_sequence_are_shared():
    manager = BlockManager(8, SIZE)
    table, _ = prompt(manager, range(11))
    cached = lookup(manager, range(11), max_tokens=10)
    assert (cached.block_ids, cached.num_tokens, cached.num_unused) == (tuple(table.block_ids[:2]), 8, 0)
    other = BlockTable()
    manager.share_prefix(other, cached)
    assert (manager.num_used_blocks, manager.num_saved_blocks, manager.num_cached_blocks) == (3, 2, 2)
    assert manager.num_shared_tokens(table) == 8
    assert manager.num_reclaimable_blocks(table) == 1
    manager.check_integrity([table, other])


@pytest.mark.parametrize(("max_tokens", "num_tokens"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (99, 8)])
def test_a_hit_ends_at_a_block_edge_before_max_tokens(max_tokens, num_tokens):
    manager = BlockManager(8, SIZE)
    prompt(manager, range(8))
    cached = lookup(manager, range(12), max_tokens=max_tokens)
    assert cached.num_tokens == num_tokens
    assert cached.first_difference is None


def test_unused_blocks_stay_until_nothing_else_is_left_and_tails_go_first():
    manager = BlockManager(6, SIZE)
    first, _ = prompt(manager, range(8))
    second, _ = prompt(manager, range(100, 108))
    old = list(first.block_ids)
    manager.free(first)
    manager.free(second)
    assert (manager.num_free_blocks, manager.num_cached_blocks, manager.num_used_blocks) == (6, 4, 0)
    assert lookup(manager, range(8)).num_unused == 2
    filler = BlockTable()
    manager.allocate(filler, 0, 3 * SIZE)  # two that hold nothing, and one that was used longest ago
    assert manager.num_evicted_blocks == 1
    assert lookup(manager, range(8)).block_ids == (old[0],), "the tail goes before the head"
    assert lookup(manager, range(100, 108)).num_tokens == 8
    manager.allocate(filler, 3 * SIZE, 4 * SIZE)
    assert lookup(manager, range(8)).num_tokens == 0
    assert lookup(manager, range(100, 108)).num_tokens == 8
    manager.check_integrity([filler])


def test_a_hit_makes_blocks_recently_used():
    manager = BlockManager(4, SIZE)
    for start in (0, 100):
        manager.free(prompt(manager, range(start, start + 8))[0])
    table = BlockTable()
    manager.share_prefix(table, lookup(manager, range(8)))
    assert manager.num_free_blocks == 2
    manager.free(table)
    filler = BlockTable()
    manager.allocate(filler, 0, 2 * SIZE)
    assert (lookup(manager, range(8)).num_tokens, lookup(manager, range(100, 108)).num_tokens) == (8, 0)


def test_what_is_looked_up_is_not_used_by_that():
    manager = BlockManager(2, SIZE)
    for start in (0, 100):
        manager.free(prompt(manager, range(start, start + 4))[0])
    assert lookup(manager, range(4)).num_tokens == 4
    manager.allocate(BlockTable(), 0, 1)
    assert lookup(manager, range(4)).num_tokens == 0


def test_tokens_that_are_not_computed_are_not_found():
    manager = BlockManager(4, SIZE)
    table, prefix = BlockTable(), manager.new_prefix()
    prefix.extend(range(8))
    manager.allocate(table, 0, 8)
    manager.register(table, prefix, 7)
    assert lookup(manager, range(8)).num_tokens == 4
    manager.register(table, prefix, 8)
    assert lookup(manager, range(8)).num_tokens == 8


def test_two_that_compute_the_same_share_what_follows():
    """The second one's own blocks are not found: the first one's are. What it generates is found after them."""
    manager = BlockManager(8, SIZE)
    first, _ = prompt(manager, range(8))
    second, prefix = prompt(manager, range(8))
    manager.allocate(second, 8, 12)
    prefix.extend(range(12))
    manager.register(second, prefix, 12)
    cached = lookup(manager, range(12))
    assert cached.block_ids == (*first.block_ids, second.block_ids[2])
    third = BlockTable()
    manager.share_prefix(third, cached)
    assert manager.num_reclaimable_blocks(second) == 2
    assert manager.num_shared_tokens(second) == 0
    manager.free(second)
    assert manager.num_cached_blocks == 3
    manager.check_integrity([first, third])


@pytest.mark.parametrize("same", ["tokens", "parent_hash"])
def test_a_collision_is_a_miss_and_caches_nothing_after_it(same):
    """A hash that was made to collide: the same 128 bits for other tokens, or after another parent."""
    manager = BlockManager(8, SIZE)
    table, prefix = prompt(manager, range(8))
    forged = manager.new_prefix()
    forged.extend([9] * SIZE if same == "parent_hash" else range(SIZE))
    own = forged.keys[0]
    parent_hash = own.parent_hash if same == "parent_hash" else bytes(16)
    forged.keys[0] = BlockKey(prefix.keys[0].block_hash, parent_hash, own.token_bytes)
    forged.extend([*([9] * SIZE), *range(50, 54)])
    assert forged.keys[1].parent_hash == prefix.keys[0].block_hash
    assert manager.find_prefix(forged, 8).num_tokens == 0
    other = BlockTable()
    manager.allocate(other, 0, 8)
    manager.register(other, forged, 8)
    assert manager.num_cached_blocks == 2
    assert lookup(manager, [*range(SIZE), *range(50, 54)]).num_tokens == SIZE, (
        "what is after the forged one is not ours"
    )
    manager.check_integrity([table, other])


def test_without_caching_nothing_is_kept():
    manager = BlockManager(4, SIZE, enable_prefix_caching=False)
    table, prefix = prompt(manager, range(8))
    assert prefix.keys == []
    assert lookup(manager, range(8)).num_tokens == 0
    manager.free(table)
    assert (manager.num_cached_blocks, manager.enable_prefix_caching) == (0, False)
    manager.check_integrity([])


def test_a_cached_block_is_never_written():
    manager = BlockManager(4, SIZE)
    table, _ = prompt(manager, range(8))
    with pytest.raises(AssertionError, match="is to be written"):
        manager.allocate(table, 7, 9)


def test_who_is_forked_off_inside_a_cached_block_copies_it_even_when_alone():
    manager = BlockManager(4, SIZE)
    table, _ = prompt(manager, range(8))
    forked = manager.fork(table, 6)
    manager.free(table)
    copied = manager.allocate(forked, 6, 7).copy_on_write
    assert (copied.position, copied.dst) == (1, forked.block_ids[1])
    assert lookup(manager, range(8)).block_ids == (forked.block_ids[0], copied.src)
    manager.check_integrity([forked])


def test_integrity_sees_a_block_that_is_kept_for_nothing():
    manager = BlockManager(4, SIZE)
    table, _ = prompt(manager, range(8))
    manager._cache.remove(table.block_ids[1])
    with pytest.raises(AssertionError, match="kept for nothing"):
        manager.check_integrity([table])


def carry_out(blocks: WrittenBlocks, call: str, pick: int, amount: int, rng: random.Random) -> None:
    """One call, on whatever it can be made for."""
    tokens = [rng.randrange(2) for _ in range(amount)]
    running, swapped = blocks.sequences, blocks.swapped
    if call == "start" or not running:
        blocks.start(salt="ab"[pick % 2], tokens=tokens)
    elif call == "grow":
        blocks.grow(running[pick % len(running)], tokens[:3])
    elif call == "fork":
        parent = running[pick % len(running)]
        blocks.fork(parent, rng.choice([len(parent.tokens), rng.randint(1, len(parent.tokens))]))
    elif call == "swap out":
        blocks.swap_out(running[pick % len(running)])
    elif call == "resume" and swapped:
        blocks.resume(swapped[pick % len(swapped)])
    elif call == "free":
        everybody = [*running, *swapped]
        blocks.free(everybody[pick % len(everybody)])


CALLS = ["start", "start", "grow", "grow", "grow", "fork", "swap out", "resume", "free", "free"]


@given(
    st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 9), st.integers(1, 14)), max_size=60),
    st.integers(1, 3),
    st.integers(4, 16),
    st.booleans(),
)
def test_no_order_of_calls_mixes_up_contents(calls, block_size, num_blocks, enable_prefix_caching):
    blocks = WrittenBlocks(
        num_blocks, block_size, num_host_blocks=num_blocks // 2, enable_prefix_caching=enable_prefix_caching
    )
    rng = random.Random(0)
    for call, pick, amount in calls:
        carry_out(blocks, call, pick, amount, rng)
        blocks.check()
    for sequence in [*blocks.sequences, *blocks.swapped]:
        blocks.free(sequence)
    blocks.check()
    assert blocks.manager.num_free_blocks == num_blocks
    assert blocks.manager.num_used_host_blocks == 0


@pytest.mark.parametrize("seed", range(3))
def test_long_runs_of_calls_hit_evict_and_swap(seed):
    """The same over thousands of calls, in which everything does happen."""
    rng = random.Random(seed)
    blocks = WrittenBlocks(24, 2, num_host_blocks=12)
    for _ in range(2000):
        carry_out(blocks, rng.choice(CALLS), rng.randrange(10), rng.randint(1, 14), rng)
        blocks.check()
    assert blocks.num_hits > 50
    assert blocks.num_swaps > 50
    assert blocks.manager.num_evicted_blocks > 300
