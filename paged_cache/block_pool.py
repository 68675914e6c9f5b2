"""The pool of fixed-size KV blocks: which are free, and how many block tables hold each of the others.

Owns reference counts. Knows no sequences, no tokens and no tensors: a block is a number.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class Block:
    """One physical block."""

    block_id: int
    ref_count: int = 0


class BlockPool:
    """Hands out blocks and takes them back. A block is free exactly when nothing refers to it."""

    def __init__(self, num_blocks: int) -> None:
        """Create `num_blocks` free blocks with ids 0 .. num_blocks - 1."""
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = deque(range(num_blocks))  # next to hand out first

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, free or not."""
        return len(self._blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nothing refers to."""
        return len(self._free)

    def ref_count(self, block_id: int) -> int:
        """How many block tables hold this block."""
        return self._blocks[block_id].ref_count

    def allocate(self) -> int:
        """Take one free block with one reference. The caller has checked that one is free."""
        assert self._free, "allocate from an empty pool"
        block = self._blocks[self._free.popleft()]
        assert block.ref_count == 0, f"free block {block.block_id} has {block.ref_count} references"
        block.ref_count = 1
        return block.block_id

    def share(self, block_id: int) -> None:
        """Add a reference to a block in use."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"share of free block {block_id}"
        block.ref_count += 1

    def release(self, block_id: int) -> None:
        """Drop a reference; the last one frees the block."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"release of free block {block_id}"
        block.ref_count -= 1
        if block.ref_count == 0:
            self._free.append(block_id)

    def check_integrity(self, expected_ref_counts: dict[int, int]) -> None:
        """Prove free + used = total and every reference count, against what the block tables hold.

        Args:
            expected_ref_counts: block id -> number of block tables that hold it.

        Raises:
            AssertionError: naming the block at fault.
        """
        free = set(self._free)
        assert len(free) == len(self._free), "a block stands twice in the free list"
        for block in self._blocks:
            expected = expected_ref_counts.get(block.block_id, 0)
            assert block.ref_count == expected, (
                f"block {block.block_id} counts {block.ref_count} references, {expected} block tables hold it"
            )
            assert (block.block_id in free) == (expected == 0), f"block {block.block_id} is free and in use, or neither"
        assert len(free) + len(expected_ref_counts) == self.num_blocks, "free + used blocks differ from the total"
