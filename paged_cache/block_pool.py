"""The pool of fixed-size KV blocks: which are free, in which order they are evicted, and who holds the others.

Owns reference counts: how many block tables hold a block. Knows no sequences, no tokens and no tensors: a block is a
number, and may be worth keeping.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator


class BlockPool:
    """Hands out blocks and takes them back. A block is free exactly when nothing refers to it.

    A free block that is kept (it holds a cached prefix) is handed out only when no other is left, the least recently
    used first, and may be shared again until then. Every operation takes the same time in a pool of any size.
    """

    def __init__(self, num_blocks: int) -> None:
        """Create `num_blocks` free blocks with ids 0 .. num_blocks - 1."""
        self._ref_counts = [0] * num_blocks
        self._is_kept = bytearray(num_blocks)
        self._empty = deque(range(num_blocks))  # free and not kept; next to hand out first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free and kept; next to hand out first
        self._num_references = 0
        self._num_shared = 0  # blocks with more than one reference

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, free or not."""
        return len(self._ref_counts)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nothing refers to."""
        return len(self._empty) + len(self._evictable)

    @property
    def num_evictable_blocks(self) -> int:
        """Of the free ones, those that are kept."""
        return len(self._evictable)

    @property
    def num_references(self) -> int:
        """Of all blocks together."""
        return self._num_references

    @property
    def num_shared_blocks(self) -> int:
        """Blocks with more than one reference."""
        return self._num_shared

    def ref_count(self, block_id: int) -> int:
        """How many block tables hold this block."""
        return self._ref_counts[block_id]

    def ref_counts(self, block_ids: Iterable[int]) -> Iterator[int]:
        """The same of many, in their order: whole tables are counted when somebody is to give way."""
        return map(self._ref_counts.__getitem__, block_ids)

    def is_kept(self, block_id: int) -> bool:
        """Whether this block is worth keeping when it is free."""
        return bool(self._is_kept[block_id])

    def kept_blocks(self) -> bytes:
        """The same of all blocks: a byte for each, 1 if it is."""
        return bytes(self._is_kept)

    def allocate(self) -> int:
        """Take one free block with one reference, which is not kept any more. The caller has checked that one is free.

        Whoever kept it must forget it: it will be written.
        """
        if self._empty:
            block_id = self._empty.popleft()
        else:
            assert self._evictable, "allocate from an empty pool"
            block_id, _ = self._evictable.popitem(last=False)
            self._is_kept[block_id] = False
        assert self._ref_counts[block_id] == 0, f"free block {block_id} has {self._ref_counts[block_id]} references"
        self._ref_counts[block_id] = 1
        self._num_references += 1
        return block_id

    def keep(self, block_id: int) -> None:
        """Keep a block in use for as long as possible once it is free."""
        assert self._ref_counts[block_id] > 0, f"keep of free block {block_id}"
        self._is_kept[block_id] = True

    def share(self, block_id: int) -> None:
        """Add a reference to a block in use, or to a free one that is kept."""
        if self._ref_counts[block_id] == 0:
            assert block_id in self._evictable, f"share of free block {block_id}"
            del self._evictable[block_id]
        self._ref_counts[block_id] += 1
        self._num_shared += self._ref_counts[block_id] == 2
        self._num_references += 1

    def release(self, block_id: int) -> None:
        """Drop a reference; the last one frees the block."""
        ref_count = self._ref_counts[block_id]
        assert ref_count > 0, f"release of free block {block_id}"
        self._ref_counts[block_id] = ref_count - 1
        self._num_references -= 1
        if ref_count > 1:
            self._num_shared -= ref_count == 2
            return
        if self._is_kept[block_id]:
            self._evictable[block_id] = None
        else:
            self._empty.append(block_id)

    def check_integrity(self, expected_ref_counts: dict[int, int]) -> None:
        """Prove free + used = total and every reference count, against what the block tables hold.

        Args:
            expected_ref_counts: block id -> number of block tables that hold it.

        Raises:
            AssertionError: naming the block at fault.
        """
        free = {*self._empty, *self._evictable}
        assert len(free) == self.num_free_blocks, "a block stands twice in the free list"
        for block_id, ref_count in enumerate(self._ref_counts):
            expected = expected_ref_counts.get(block_id, 0)
            assert ref_count == expected, (
                f"block {block_id} counts {ref_count} references, {expected} block tables hold it"
            )
            assert (block_id in free) == (expected == 0), f"block {block_id} is free and in use, or neither"
            assert (block_id in self._evictable) == (expected == 0 and self._is_kept[block_id]), (
                f"block {block_id} is evictable and not kept, or kept and lost"
            )
        assert len(free) + len(expected_ref_counts) == self.num_blocks, "free + used blocks differ from the total"
        assert self._num_references == sum(expected_ref_counts.values()), "references are counted wrongly"
        num_shared = sum(count > 1 for count in expected_ref_counts.values())
        assert self._num_shared == num_shared, f"{self._num_shared} blocks count as shared, {num_shared} are"
