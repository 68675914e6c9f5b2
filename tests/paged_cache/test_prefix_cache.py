"""Keys of blocks, and what is a hit: who shares, what is compared, and where a miss says that it differs."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_cache.prefix_cache import MAX_COMPARED, BlockHasher, BlockKey, PrefixCache, TokenPrefix

SIZE = 4


def prefix_of(tokens, hasher, *salts) -> TokenPrefix:
    prefix = TokenPrefix(hasher, SIZE, hasher.root(salts))
    prefix.extend(tokens)
    return prefix


def cache_of(*prefixes: TokenPrefix) -> PrefixCache:
    """Every key once, in blocks of increasing ids."""
    keys = list(dict.fromkeys(key for prefix in prefixes for key in prefix.keys))
    cache = PrefixCache(len(keys))
    for block_id, key in enumerate(keys):
        assert cache.add(key, block_id)
    return cache


@given(st.lists(st.integers(0, 2**31 - 1), max_size=30), st.lists(st.integers(0, 9), max_size=6))
def test_keys_do_not_depend_on_how_tokens_became_known(tokens, steps):
    hasher = BlockHasher()
    whole = prefix_of(tokens, hasher)
    assert len(whole.keys) == len(tokens) // SIZE
    grown, end = TokenPrefix(hasher, SIZE, whole.root), 0
    for step in steps:
        end += step
        grown.extend(tuple(tokens[:end]))
    assert grown.keys == whole.keys[: min(end, len(tokens)) // SIZE]
    grown.extend(array("i", tokens))
    assert grown.keys == whole.keys
    for key, parent_hash in zip(whole.keys, [whole.root, *(key.block_hash for key in whole.keys)], strict=False):
        assert key.parent_hash == parent_hash
        assert len(key.block_hash) == 16
    assert b"".join(key.token_bytes for key in whole.keys) == array("i", tokens[: len(whole.keys) * SIZE]).tobytes()


def test_a_fork_goes_on_by_itself():
    hasher = BlockHasher()
    prefix = prefix_of(range(8), hasher)
    forked = prefix.fork()
    forked.extend([*range(8), 1, 2, 3, 4])
    prefix.extend([*range(8), 4, 3, 2, 1])
    assert forked.keys[:2] == prefix.keys[:2]
    assert forked.keys[2] != prefix.keys[2]
    assert (len(forked.keys), len(prefix.keys)) == (3, 3)


@pytest.mark.parametrize(
    "other",
    [("a",), ("", "a"), ("a", "b", ""), ("ab", ""), ("", "ab"), ("b", "a"), (), ("\ud800", "b")],
    ids=repr,
)
def test_other_salts_share_nothing(other):
    """Salts that run together into the same characters are other salts all the same."""
    hasher = BlockHasher()
    own = prefix_of(range(8), hasher, "a", "b")
    others = prefix_of(range(8), hasher, *other)
    assert cache_of(own).find(others.keys) == []
    assert cache_of(own).find(prefix_of(range(8), hasher, "a", "b").keys) == [0, 1]
    assert cache_of(own).num_equal_tokens(others.keys[0]) is None, "a miss tells nothing of what others have"


def test_hashes_cannot_be_foretold():
    """Another process, or the same one started again, hashes the same tokens to something else."""
    assert prefix_of(range(8), BlockHasher()).keys != prefix_of(range(8), BlockHasher()).keys


def test_the_same_hash_is_a_miss_if_the_tokens_or_the_parent_differ():
    [key] = prefix_of(range(SIZE), BlockHasher()).keys
    other_tokens = BlockKey(key.block_hash, key.parent_hash, array("i", [9, 8, 7, 6]).tobytes())
    other_parent = BlockKey(key.block_hash, bytes(16), key.token_bytes)
    cache = PrefixCache(2)
    cache.add(key, 0)
    assert (cache.get(key), cache.find([key])) == (0, [0])
    for other in (other_tokens, other_parent):
        assert cache.get(other) is None
        assert cache.find([other]) == []
        assert not cache.add(other, 1), "what follows a block that cannot be found must not be cached"
        assert 1 not in cache
        assert cache.get(key) == 0
    cache.check_integrity()


def test_a_key_keeps_its_first_block():
    [key] = prefix_of(range(SIZE), BlockHasher()).keys
    cache = PrefixCache(2)
    assert cache.add(key, 1)
    assert cache.add(key, 0)
    assert cache.get(key) == 1
    assert (0 in cache, len(cache)) == (False, 1)


@pytest.mark.parametrize(
    ("tokens", "num_found", "num_equal"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 2, None),
        ([0, 1, 2, 3, 4, 5, 9, 7], 1, 2),
        ([0, 1, 2, 3, 9, 5, 6, 7], 1, 0),
        ([0, 1, 2, 256, 4, 5, 6, 7], 0, 3),  # differs in the second byte of a token
        ([0, 1, 2, 3 + 2**24, 4, 5, 6, 7], 0, 3),
        ([0, 1, 2, 3, 4, 5, 6, 7, 1, 1, 1, 1], 2, None),  # nothing cached goes on from there
    ],
)
def test_a_miss_says_how_far_the_likest_block_goes(tokens, num_found, num_equal):
    hasher = BlockHasher()
    cache = cache_of(
        prefix_of([0, 1, 2, 3, 7, 7, 7, 7], hasher),
        prefix_of(range(8), hasher),
        prefix_of([0, 9, 9, 9], hasher),
    )
    keys = prefix_of(tokens, hasher).keys
    found = cache.find(keys)
    assert len(found) == num_found
    if num_found < len(keys):
        assert cache.num_equal_tokens(keys[num_found]) == num_equal


def test_a_miss_is_compared_with_a_few_of_many():
    hasher = BlockHasher()
    cache = cache_of(*(prefix_of([1, 2, 3, i], hasher) for i in range(50)), prefix_of([1, 9, 9, 9], hasher))
    [key] = prefix_of([1, 2, 3, 99], hasher).keys
    assert cache.num_equal_tokens(key) == 3
    for i in range(MAX_COMPARED):
        cache = cache_of(prefix_of([1, 2, 3, 4], hasher), *(prefix_of([1, 9, 9, j], hasher) for j in range(i)))
        assert cache.num_equal_tokens(key) == 3


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.lists(st.integers(0, 1), min_size=2, max_size=6))))
def test_links_survive_any_order_of_adding_and_removing(calls):
    hasher = BlockHasher()
    cache, held = PrefixCache(8), {}
    for adds, block_id, tokens in calls:
        prefix = TokenPrefix(hasher, 2, b"root")
        prefix.extend(tokens)
        key = prefix.keys[-1]
        if adds and block_id not in held and key not in held.values():
            assert cache.add(key, block_id)
            held[block_id] = key
        else:
            assert cache.remove(block_id) == (held.pop(block_id, None) is not None)
        cache.check_integrity()
        assert len(cache) == len(held)
        assert {block_id: cache.get(key) for block_id, key in held.items()} == {b: b for b in held}


def test_integrity_sees_what_is_cached_under_another_key():
    hasher = BlockHasher()
    cache = cache_of(prefix_of(range(8), hasher))
    cache._keys[1] = prefix_of([5] * SIZE, hasher).keys[0]
    with pytest.raises(AssertionError, match="differ"):
        cache.check_integrity()
