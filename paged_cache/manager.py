"""Allocates, shares, copies, caches, swaps and frees the blocks of block tables: the host half of the paged KV cache.

Takes token counts and token ids, never requests or sequences; moves no data itself: a copy it asks for is carried out
by the model runner before the step writes. (PagedAttention paper, sections 4.2 to 4.5.)
"""

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass
from itertools import islice

from paged_cache.block_pool import BlockPool
from paged_cache.block_table import BlockTable
from paged_cache.prefix_cache import BlockHasher, CachedPrefix, PrefixCache, TokenPrefix


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


@dataclass(frozen=True, slots=True)
class BlockMove:
    """A block to be copied between the device and the host; which way, says who returned it."""

    src: int
    dst: int


_NOTHING_CHANGED = Allocation((), None)


class BlockManager:
    """Owns both pools and the prefix cache; every change of a block table goes through it.

    Blocks change hands when they are scheduled, not when they are computed: a block may be registered, shared or moved
    as soon as the step that fills it is certain to run before whatever reads it.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, num_host_blocks: int = 0, enable_prefix_caching: bool = True
    ) -> None:
        """Manage `num_blocks` blocks of `block_size` tokens on the device, and `num_host_blocks` to swap them to."""
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._host_pool = BlockPool(num_host_blocks)
        self._cache = PrefixCache(num_blocks)
        self._hasher = BlockHasher() if enable_prefix_caching else None
        self._num_evicted_blocks = 0

    # --- how full it is ---

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds, cached ones included: they are evicted when nothing else is left."""
        return self._pool.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that at least one table holds; a shared block counts once."""
        return self.num_blocks - self.num_free_blocks

    @property
    def num_saved_blocks(self) -> int:
        """How many more blocks would be in use if none were shared."""
        return self._pool.num_references - self.num_used_blocks

    @property
    def num_shared_blocks(self) -> int:
        """Blocks that more than one table holds."""
        return self._pool.num_shared_blocks

    def num_empty_slots(self, held: Iterable[tuple[BlockTable, int]]) -> int:
        """Slots of used blocks that hold no token: what paging wastes.

        Args:
            held: every table that holds blocks, with the number of its tokens that are in them.
        """
        block_size, pool = self.block_size, self._pool
        if not pool.num_shared_blocks:
            return pool.num_references * block_size - sum(num_tokens for _, num_tokens in held)
        num_empty = pool.num_references * block_size
        most_tokens: dict[int, int] = {}  # of partial blocks that several tables hold
        for table, num_tokens in held:
            num_empty -= num_tokens
            num_full, num_partial = divmod(num_tokens, block_size)
            if num_partial and pool.ref_count(block_id := table.block_ids[num_full]) > 1:
                num_empty -= block_size - num_partial
                most_tokens[block_id] = max(num_partial, most_tokens.get(block_id, 0))
        return num_empty + sum(block_size - num_tokens for num_tokens in most_tokens.values())

    @property
    def enable_prefix_caching(self) -> bool:
        """Full blocks are kept for whoever begins alike."""
        return self._hasher is not None

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that hold a prefix which others may share, used ones included."""
        return len(self._cache)

    @property
    def num_evictable_blocks(self) -> int:
        """Of the cached blocks, those that no table holds."""
        return self._pool.num_evictable_blocks

    def cached_blocks(self) -> bytes:
        """Which blocks those are: a byte for each block of the pool, 1 if it is one."""
        return self._pool.kept_blocks()

    @property
    def num_evicted_blocks(self) -> int:
        """Cached blocks that were handed out for something else, since the start."""
        return self._num_evicted_blocks

    @property
    def num_host_blocks(self) -> int:
        """Blocks in host memory."""
        return self._host_pool.num_blocks

    @property
    def num_used_host_blocks(self) -> int:
        """Of them, those that hold blocks of swapped-out tables."""
        return self.num_host_blocks - self._host_pool.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_reclaimable_blocks(self, table: BlockTable) -> int:
        """Blocks that would be free if the table were freed: those that no other table holds."""
        if self.num_saved_blocks == 0:  # nothing is shared by anybody
            return len(table)
        return list(self._pool.ref_counts(table.block_ids)).count(1)

    def num_freed_blocks(self, table: BlockTable, given_up: Counter[int], needed: Set[int] = frozenset()) -> int:
        """Blocks that would be free if the table were freed after others that share blocks with it.

        Args:
            table: to be freed after them.
            given_up: references by block id that the others would have given up; those of this table are added.
            needed: blocks that do not count, for whoever wants room would share them.
        """
        freed: Iterable[int] = table.block_ids
        if self.num_saved_blocks:
            given_up.update(table.block_ids)
            ref_counts = self._pool.ref_counts(table.block_ids)
            freed = [i for i, count in zip(table.block_ids, ref_counts, strict=True) if count == given_up[i]]
        return sum(block_id not in needed for block_id in freed)

    def num_shared_tokens(self, table: BlockTable) -> int:
        """Slots of the table's leading blocks that other tables hold too."""
        if self.num_saved_blocks == 0:
            return 0
        ref_counts = self._pool.ref_counts(table.block_ids)
        num_shared = next((position for position, count in enumerate(ref_counts) if count == 1), len(table))
        return num_shared * self.block_size

    # --- block tables ---

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
        new_block_ids = tuple(self._take_block() for _ in range(num_new))
        table.block_ids.extend(new_block_ids)
        return Allocation(new_block_ids, copy_on_write)

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """A new table that shares the blocks of the first `num_tokens` tokens, the last partial block included."""
        shared = table.block_ids[: self.num_blocks_for(num_tokens)]
        for block_id in shared:
            self._pool.share(block_id)
        return BlockTable(shared, num_registered=min(table.num_registered, num_tokens // self.block_size))

    def free(self, table: BlockTable) -> None:
        """Drop every block of the table, on the device and on the host, and leave it empty.

        The last block goes first: of two cached blocks of a sequence the later one is evicted earlier.
        """
        while table.block_ids:
            self._pool.release(table.block_ids.pop())
        table.num_registered = 0
        self._free_host_blocks(table)

    # --- prefix caching ---

    def new_prefix(self, *salts: str) -> TokenPrefix:
        """The keys of a new sequence, which shares blocks with those of equal salts alone."""
        if self._hasher is None:
            return TokenPrefix(None, self.block_size, b"")
        return TokenPrefix(self._hasher, self.block_size, self._hasher.root(salts))

    def find_prefix(self, prefix: TokenPrefix, max_tokens: int) -> CachedPrefix:
        """The longest cached run of full blocks that a sequence begins with, of at most `max_tokens` tokens.

        Changes nothing. What it returns holds until blocks are allocated or freed.
        """
        keys = prefix.keys[: max_tokens // self.block_size]
        block_ids = self._cache.find(keys)
        first_difference = None
        if len(block_ids) < len(keys):
            num_equal = self._cache.num_equal_tokens(keys[len(block_ids)])
            if num_equal is not None:
                first_difference = len(block_ids) * self.block_size + num_equal
        return CachedPrefix(
            block_ids=tuple(block_ids),
            num_tokens=len(block_ids) * self.block_size,
            num_unused=list(self._pool.ref_counts(block_ids)).count(0),
            first_difference=first_difference,
        )

    def share_prefix(self, table: BlockTable, cached: CachedPrefix) -> None:
        """Let an empty table begin with cached blocks, which are in use from now on."""
        assert not table.block_ids, f"a prefix is shared with a table that holds {len(table)} blocks"
        for block_id in cached.block_ids:
            self._pool.share(block_id)
        table.block_ids.extend(cached.block_ids)
        table.num_registered = len(cached.block_ids)

    def register(self, table: BlockTable, prefix: TokenPrefix, num_tokens: int) -> None:
        """Let others find the table's full blocks, as far as they are keyed and `num_tokens` tokens are in them.

        The tokens must be computed by steps that are certain to run. A key that is cached already keeps its first
        block: the table's own is freed with the table.
        """
        num_full = min(num_tokens // self.block_size, len(prefix.keys))
        if num_full <= table.num_registered or self._hasher is None:
            return
        for key, block_id in islice(zip(prefix.keys, table.block_ids, strict=False), table.num_registered, num_full):
            if not self._cache.add(key, block_id):
                return
            if block_id in self._cache:
                self._pool.keep(block_id)
            table.num_registered += 1

    # --- swapping ---

    def swap_out(self, table: BlockTable, num_tokens: int) -> tuple[BlockMove, ...] | None:
        """Free the table's blocks on the device; those of its first `num_tokens` tokens get a place on the host.

        Returns:
            Moves from the device to the host, to be made before anything is written to the blocks that are free now;
            None when too few host blocks are free, and nothing has changed.
        """
        assert not table.host_block_ids, "a table is swapped out twice"
        moved = table.block_ids[: self.num_blocks_for(num_tokens)]
        if len(moved) > self._host_pool.num_free_blocks:
            return None
        moves = tuple(BlockMove(block_id, self._host_pool.allocate()) for block_id in moved)
        self.free(table)
        table.host_block_ids.extend(move.dst for move in moves)
        return moves

    def swap_in(self, table: BlockTable, first_position: int) -> tuple[BlockMove, ...]:
        """Bring back what a swapped-out table held, once it has blocks on the device again; its host blocks are free.

        No block may be swapped out after this in the same step: moves to the host are made before those from it.

        Args:
            table: with its block ids in place for all that was swapped out.
            first_position: of the block table; the blocks before it are there already, as a cached prefix.

        Returns:
            Moves from the host to the device.
        """
        assert len(table.host_block_ids) <= len(table), "a table is swapped in with too few blocks"
        pairs = zip(table.host_block_ids, table.block_ids, strict=False)
        moves = tuple(BlockMove(src, dst) for src, dst in islice(pairs, first_position, None))
        self._free_host_blocks(table)
        return moves

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Prove free + used = total and every reference count of both pools, and what is cached.

        Args:
            tables: every block table in existence.

        Raises:
            AssertionError: naming the block at fault.
        """
        counts: Counter[int] = Counter()
        host_counts: Counter[int] = Counter()
        for table in tables:
            assert len(set(table.block_ids)) == len(table), f"a block stands twice in the table {table.block_ids}"
            assert table.num_registered <= len(table), f"more blocks are registered than stand in {table.block_ids}"
            counts.update(table.block_ids)
            host_counts.update(table.host_block_ids)
        assert all(count == 1 for count in host_counts.values()), "a host block stands in two tables"
        self._pool.check_integrity(counts)
        self._host_pool.check_integrity(host_counts)
        self._cache.check_integrity()
        for block_id in range(self.num_blocks):
            assert (block_id in self._cache) == self._pool.is_kept(block_id), f"block {block_id} is kept for nothing"

    def _shared_partial_block(self, table: BlockTable, num_computed_tokens: int) -> int | None:
        """Position of the block that holds the next token to write, if another table holds it too, or may be given it.

        A cached block is full: whoever was forked off inside it writes to a copy.
        """
        position = num_computed_tokens // self.block_size
        if position < len(table):
            block_id = table.block_ids[position]
            assert position >= table.num_registered, f"registered block {block_id} is to be written"
            if self._pool.ref_count(block_id) > 1 or self._pool.is_kept(block_id):
                return position
        return None

    def _copy(self, table: BlockTable, position: int) -> CopyOnWrite:
        src = table.block_ids[position]
        dst = self._take_block()
        table.block_ids[position] = dst
        self._pool.release(src)
        return CopyOnWrite(position, src, dst)

    def _take_block(self) -> int:
        block_id = self._pool.allocate()
        self._num_evicted_blocks += self._cache.remove(block_id)
        return block_id

    def _free_host_blocks(self, table: BlockTable) -> None:
        for block_id in table.host_block_ids:  # in their order: blocks side by side are moved as one
            self._host_pool.release(block_id)
        table.host_block_ids.clear()
