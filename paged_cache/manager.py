"""Allocates, shares, copies and frees the blocks of block tables: the host half of the paged KV cache.

Takes token counts, never requests or sequences; moves no data itself: a copy it asks for is carried out by the
model runner before the step writes. (PagedAttention paper, sections 4.2 to 4.4.)
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from paged_cache.block_pool import BlockPool
from paged_cache.block_table import BlockTable


@dataclass(frozen=True, slots=True)
class CopyOnWrite:
    """A shared block that was replaced in a table by a copy of its own."""

    position: int  # in the block table
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """What `allocate` changed in a block table."""

    new_block_ids: tuple[int, ...]
    copy_on_write: CopyOnWrite | None


_NOTHING_CHANGED = Allocation((), None)


class BlockManager:
    """Owns the pool; every change of a block table goes through it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Manage `num_blocks` blocks of `block_size` tokens."""
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds."""
        return self._pool.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that at least one table holds; a shared block counts once."""
        return self.num_blocks - self.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, table: BlockTable, num_computed_tokens: int, num_tokens: int) -> Allocation | None:
        """Make the slots of tokens `num_computed_tokens .. num_tokens - 1` exist and belong to this table alone.

        Appends blocks up to `num_tokens`, and replaces the partial block where writing starts by a copy if
        another table shares it (copy-on-write). All or nothing.

        Returns:
            What changed, or None when too few blocks are free; the table is then as it was.
        """
        copied = self._shared_partial_block(table, num_computed_tokens)
        num_new = max(0, self.num_blocks_for(num_tokens) - len(table))
        if num_new == 0 and copied is None:  # nearly every decode
            return _NOTHING_CHANGED
        if num_new + (copied is not None) > self.num_free_blocks:
            return None
        copy_on_write = None if copied is None else self._copy(table, copied)
        new_block_ids = tuple(self._pool.allocate() for _ in range(num_new))
        table.block_ids.extend(new_block_ids)
        return Allocation(new_block_ids, copy_on_write)

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """A new table that shares the blocks of the first `num_tokens` tokens, the last partial block included."""
        shared = table.block_ids[: self.num_blocks_for(num_tokens)]
        for block_id in shared:
            self._pool.share(block_id)
        return BlockTable(list(shared))

    def free(self, table: BlockTable) -> None:
        """Drop every block of the table, last one first, and leave it empty."""
        while table.block_ids:
            self._pool.release(table.block_ids.pop())

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Prove free + used = total and every reference count.

        Args:
            tables: every block table in existence.

        Raises:
            AssertionError: naming the block at fault.
        """
        counts: Counter[int] = Counter()
        for table in tables:
            assert len(set(table.block_ids)) == len(table), f"a block stands twice in the table {table.block_ids}"
            counts.update(table.block_ids)
        self._pool.check_integrity(counts)

    def _shared_partial_block(self, table: BlockTable, num_computed_tokens: int) -> int | None:
        """Position of the block that holds the next token to write, if another table holds it too."""
        position = num_computed_tokens // self.block_size
        if position < len(table) and self._pool.ref_count(table.block_ids[position]) > 1:
            return position
        return None

    def _copy(self, table: BlockTable, position: int) -> CopyOnWrite:
        src = table.block_ids[position]
        dst = self._pool.allocate()
        table.block_ids[position] = dst
        self._pool.release(src)
        return CopyOnWrite(position, src, dst)
