"""Which blocks hold which prefixes: keys of full blocks, chained from the root of those who may share, and the blocks.

Owns the hashes and what is compared on a hit. Knows no requests and no reference counts: who holds a block, and when
it is evicted, is the pool's.
"""

import hashlib
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_HASH_BYTES = 16
_TOKEN_BITS = 32  # of a token id, as it is hashed and compared
_NONE = -1  # no block
MAX_COMPARED = 8  # cached blocks, the newest ones, that a missed block is compared with to say where it differs


class BlockKey(NamedTuple):
    """What a full block holds, and after which tokens. Two keys are the same only if all three parts are."""

    block_hash: bytes  # keyed hash of the two parts below
    parent_hash: bytes  # of the block before, or of the root
    token_bytes: bytes  # its tokens, 32 bits each


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The longest cached run of full blocks that a sequence may begin with."""

    block_ids: tuple[int, ...]
    num_tokens: int
    num_unused: int  # blocks that no table holds: they count as free, and are not once they are shared
    first_difference: int | None  # first token that differs from the cached sequence that is most alike, of the
    # newest few; None = all that was looked up is cached, or nothing cached goes on from there


class BlockHasher:
    """Chains the hashes of blocks. The key is drawn anew by each: nobody outside can make two prefixes collide.

    (GHSA-rm76-4mrf-v9r8: with a hash that can be foretold, a prompt can be given another one's blocks.)
    """

    def __init__(self) -> None:
        """Draw the key."""
        key = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)
        self._root = hashlib.blake2b(key=key, digest_size=_HASH_BYTES, person=b"root")
        self._block = hashlib.blake2b(key=key, digest_size=_HASH_BYTES, person=b"block")

    def root(self, salts: Sequence[str]) -> bytes:
        """The hash before the first block: only sequences with equal salts share blocks."""
        hashed = self._root.copy()
        for salt in salts:
            data = salt.encode("utf-8", "surrogatepass")
            hashed.update(len(data).to_bytes(8, "little") + data)
        return hashed.digest()

    def key(self, parent_hash: bytes, token_bytes: bytes) -> BlockKey:
        """The key of a block after its parent."""
        hashed = self._block.copy()  # with the hash's key taken in already: half the time of starting anew
        hashed.update(parent_hash + token_bytes)
        return BlockKey(hashed.digest(), parent_hash, token_bytes)


class TokenPrefix:
    """The keys of one sequence's full blocks, as far as its tokens are known."""

    __slots__ = ("_block_size", "_hasher", "_root", "keys")

    def __init__(self, hasher: BlockHasher | None, block_size: int, root: bytes) -> None:
        """Begin at `root`; without a hasher no block is ever keyed, for nothing will be looked up."""
        self._hasher = hasher
        self._block_size = block_size
        self._root = root
        self.keys: list[BlockKey] = []

    @property
    def root(self) -> bytes:
        """The hash before the first block."""
        return self._root

    def extend(self, token_ids: Sequence[int]) -> None:
        """Key the full blocks of a sequence beyond those that are keyed already.

        Args:
            token_ids: all of its known tokens from the first on.
        """
        first = len(self.keys) * self._block_size
        end = len(token_ids) - len(token_ids) % self._block_size
        if end <= first or self._hasher is None:
            return
        data = array("i", token_ids[first:end]).tobytes()
        parent_hash = self.keys[-1].block_hash if self.keys else self._root
        num_bytes = len(data) * self._block_size // (end - first)  # of one block
        for start in range(0, len(data), num_bytes):
            key = self._hasher.key(parent_hash, data[start : start + num_bytes])
            self.keys.append(key)
            parent_hash = key.block_hash

    def fork(self) -> "TokenPrefix":
        """The same keys for a sequence that goes on in another way."""
        forked = TokenPrefix(self._hasher, self._block_size, self._root)
        forked.keys = self.keys.copy()
        return forked


class PrefixCache:
    """Finds the block that holds a key. Blocks that begin alike are linked, so that a miss can say where it differs."""

    def __init__(self, num_blocks: int) -> None:
        """Nothing of `num_blocks` blocks is cached."""
        self._block_ids: dict[bytes, int] = {}  # by block_hash
        self._keys: list[BlockKey | None] = [None] * num_blocks  # by block id
        self._newest_child: dict[bytes, int] = {}  # by parent_hash
        self._older: list[int] = [_NONE] * num_blocks  # the next older child of the same parent, by block id
        self._newer: list[int] = [_NONE] * num_blocks

    def __len__(self) -> int:
        """Cached blocks."""
        return len(self._block_ids)

    def __contains__(self, block_id: int) -> bool:
        """Whether this block is cached."""
        return self._keys[block_id] is not None

    def get(self, key: BlockKey) -> int | None:
        """The block that holds exactly this; an equal hash of anything else is a miss."""
        block_id = self._block_ids.get(key.block_hash)
        return block_id if block_id is not None and self._keys[block_id] == key else None

    def find(self, keys: Sequence[BlockKey]) -> list[int]:
        """The blocks that hold the longest cached run of leading keys."""
        block_ids, cached_keys, found = self._block_ids, self._keys, []
        for key in keys:
            block_id = block_ids.get(key.block_hash)
            if block_id is None or cached_keys[block_id] != key:
                break
            found.append(block_id)
        return found

    def add(self, key: BlockKey, block_id: int) -> bool:
        """Cache a block; a key that is cached already keeps its first block.

        Returns:
            False if something else has the same hash: then nothing that follows this key may be cached either.
        """
        other = self._block_ids.get(key.block_hash)
        if other is not None:
            return self._keys[other] == key
        assert self._keys[block_id] is None, f"block {block_id} is cached under two keys"
        self._block_ids[key.block_hash] = block_id
        self._keys[block_id] = key
        older = self._newest_child.get(key.parent_hash, _NONE)
        self._newest_child[key.parent_hash] = block_id
        self._older[block_id] = older
        if older != _NONE:
            self._newer[older] = block_id
        return True

    def remove(self, block_id: int) -> bool:
        """Forget what a block holds, if it is cached.

        Returns:
            Whether it was.
        """
        key = self._keys[block_id]
        if key is None:
            return False
        self._keys[block_id] = None
        del self._block_ids[key.block_hash]
        older, newer = self._older[block_id], self._newer[block_id]
        self._older[block_id] = self._newer[block_id] = _NONE
        if older != _NONE:
            self._newer[older] = newer
        if newer != _NONE:
            self._older[newer] = older
        elif older != _NONE:
            self._newest_child[key.parent_hash] = older
        else:
            del self._newest_child[key.parent_hash]
        return True

    def num_equal_tokens(self, key: BlockKey) -> int | None:
        """Leading tokens of a missed block that a cached block after the same parent has too; None = there is none."""
        child = self._newest_child.get(key.parent_hash, _NONE)
        most = None
        for _ in range(MAX_COMPARED):
            cached = None if child == _NONE else self._keys[child]
            if cached is None:
                break
            most = max(most or 0, _num_equal_tokens(key.token_bytes, cached.token_bytes))
            child = self._older[child]
        return most

    def check_integrity(self) -> None:
        """Prove that blocks, keys and the links between blocks agree.

        Raises:
            AssertionError: naming the block at fault.
        """
        cached = {block_id: key for block_id, key in enumerate(self._keys) if key is not None}
        assert {key.block_hash: block_id for block_id, key in cached.items()} == self._block_ids, (
            "the blocks' keys and the blocks by hash differ"
        )
        linked = set()
        for parent_hash, newest in self._newest_child.items():
            newer, block_id = _NONE, newest
            while block_id != _NONE:
                assert block_id not in linked, f"block {block_id} is linked twice"
                assert self._newer[block_id] == newer, f"block {block_id} does not link back"
                key = cached.get(block_id)
                assert key is not None and key.parent_hash == parent_hash, f"block {block_id} has another parent"
                linked.add(block_id)
                newer, block_id = block_id, self._older[block_id]
        assert linked == set(cached), f"cached blocks are not linked: {sorted(set(cached) - linked)}"


def _num_equal_tokens(some: bytes, other: bytes) -> int:
    differing = int.from_bytes(some, "little") ^ int.from_bytes(other, "little")
    lowest_bit = (differing & -differing).bit_length() - 1
    return lowest_bit // _TOKEN_BITS if differing else len(some) * 8 // _TOKEN_BITS
