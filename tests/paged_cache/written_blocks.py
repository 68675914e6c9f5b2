"""Sequences over a block manager whose blocks have contents, beside a plain model of what is cached and evicted.

What stands in a slot is the whole prefix that its token was computed from: a block that is shared, copied, moved or
evicted wrongly is read as somebody else's.
"""

from dataclasses import dataclass, field

from paged_cache.block_table import BlockTable
from paged_cache.manager import BlockManager
from paged_cache.prefix_cache import TokenPrefix


@dataclass
class WrittenSequence:
    """Tokens that are all computed, but while the sequence is swapped out."""

    salt: str
    tokens: list[int]
    prefix: TokenPrefix
    table: BlockTable = field(default_factory=BlockTable)
    num_computed: int = 0

    def content(self, position: int) -> tuple:
        return self.salt, tuple(self.tokens[: position + 1])


class WrittenBlocks:
    """Drives a manager, writes what it says may be written, and reads everything back after each call."""

    def __init__(self, num_blocks: int, block_size: int, **settings) -> None:
        self.manager = BlockManager(num_blocks, block_size, **settings)
        self.size = block_size
        self.device: list[list] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[list] = [[None] * block_size for _ in range(self.manager.num_host_blocks)]
        self.sequences: list[WrittenSequence] = []
        self.swapped: list[WrittenSequence] = []
        # The model: in which order free blocks are handed out, and which block holds which prefix.
        self.empty, self.evictable = list(range(num_blocks)), []
        self.cached: dict[tuple, int] = {}
        self.num_hits = self.num_swaps = 0  # sequences that began with cached blocks; that came back from the host

    def cached_blocks(self, salt: str, tokens: list[int], max_tokens: int) -> list[int]:
        """What the model says that a sequence may begin with."""
        found = []
        for end in range(self.size, min(max_tokens, len(tokens)) + 1, self.size):
            block_id = self.cached.get((salt, tuple(tokens[:end])))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def start(self, salt: str, tokens: list[int]) -> WrittenSequence | None:
        """A new sequence, with all it can begin with; None if blocks are short."""
        sequence = WrittenSequence(salt, tokens, self.manager.new_prefix(salt))
        return sequence if self._run(sequence) else None

    def resume(self, sequence: WrittenSequence) -> bool:
        """Bring a swapped-out sequence back, and compute what was not swapped out."""
        return self._run(sequence)

    def grow(self, sequence: WrittenSequence, tokens: list[int]) -> bool:
        """Compute more tokens. False if blocks are short: nothing has changed."""
        before, end = list(sequence.table.block_ids), len(sequence.tokens) + len(tokens)
        allocation = self.manager.allocate(sequence.table, len(sequence.tokens), end)
        if allocation is None:
            assert sequence.table.block_ids == before
            return False
        copied = allocation.copy_on_write
        self._handed_out(() if copied is None else (copied.dst,))
        if copied is not None:
            self.device[copied.dst] = list(self.device[copied.src])
            self._released([copied.src])
        self._handed_out(allocation.new_block_ids)
        sequence.tokens.extend(tokens)
        self._compute(sequence)
        return True

    def fork(self, sequence: WrittenSequence, num_tokens: int) -> WrittenSequence:
        """A sequence that shares the first tokens of another."""
        forked = WrittenSequence(sequence.salt, sequence.tokens[:num_tokens], sequence.prefix.fork())
        if num_tokens < len(sequence.tokens):
            del forked.prefix.keys[num_tokens // self.size :]
        forked.table = self.manager.fork(sequence.table, num_tokens)
        forked.num_computed = num_tokens
        self.sequences.append(forked)
        return forked

    def free(self, sequence: WrittenSequence) -> None:
        """End a sequence, wherever its blocks are."""
        released = list(reversed(sequence.table.block_ids))
        self.manager.free(sequence.table)
        assert sequence.table == BlockTable()
        self._released(released)
        (self.sequences if sequence in self.sequences else self.swapped).remove(sequence)

    def swap_out(self, sequence: WrittenSequence) -> bool:
        """Move a sequence to the host. False if too few blocks are free there: nothing has changed."""
        released = list(reversed(sequence.table.block_ids))
        room = self.manager.num_host_blocks - self.manager.num_used_host_blocks
        moves = self.manager.swap_out(sequence.table, sequence.num_computed)
        needed = -(-sequence.num_computed // self.size)
        assert (moves is None) == (needed > room)
        if moves is None:
            assert list(reversed(sequence.table.block_ids)) == released
            return False
        assert [move.src for move in moves] == released[::-1][:needed]
        for move in moves:
            self.host[move.dst] = list(self.device[move.src])
        self._released(released)
        self.sequences.remove(sequence)
        self.swapped.append(sequence)
        return True

    def check(self) -> None:
        """Every token is where its table says, and the manager agrees with the model and with itself."""
        manager = self.manager
        manager.check_integrity(s.table for s in [*self.sequences, *self.swapped])
        for sequence in self.sequences:
            for position in range(sequence.num_computed):
                block_id = sequence.table.block_ids[position // self.size]
                assert self.device[block_id][position % self.size] == sequence.content(position)
        held = [block_id for s in self.sequences for block_id in s.table.block_ids]
        assert manager.num_used_blocks == len(set(held))
        assert manager.num_saved_blocks == len(held) - len(set(held))
        assert manager.num_free_blocks == len(self.empty) + len(self.evictable)
        assert manager.num_cached_blocks == len(self.cached)
        assert manager.num_used_host_blocks == sum(len(s.table.host_block_ids) for s in self.swapped)
        for sequence in self.sequences:
            is_own = [held.count(block_id) == 1 for block_id in sequence.table.block_ids]
            assert manager.num_reclaimable_blocks(sequence.table) == sum(is_own)
            num_shared = is_own.index(True) if True in is_own else len(is_own)
            assert manager.num_shared_tokens(sequence.table) == num_shared * self.size

    def _run(self, sequence: WrittenSequence) -> bool:
        manager, tokens = self.manager, sequence.tokens
        sequence.prefix.extend(tokens)
        cached = manager.find_prefix(sequence.prefix, len(tokens) - 1)
        expected = self.cached_blocks(sequence.salt, tokens, len(tokens) - 1)
        assert list(cached.block_ids) == expected
        assert cached.num_tokens == len(expected) * self.size
        assert cached.num_unused == sum(block_id in self.evictable for block_id in expected)
        self._check_difference(sequence, cached.first_difference)
        needed = manager.num_blocks_for(len(tokens)) - len(expected)
        if needed + cached.num_unused > manager.num_free_blocks:
            return False
        self.num_hits += bool(expected)
        manager.share_prefix(sequence.table, cached)
        self.evictable = [block_id for block_id in self.evictable if block_id not in expected]
        allocation = manager.allocate(sequence.table, cached.num_tokens, len(tokens))
        assert allocation is not None
        assert allocation.copy_on_write is None
        self._handed_out(allocation.new_block_ids)
        first, was_computed = len(expected), sequence.num_computed
        if sequence in self.swapped:
            moves = manager.swap_in(sequence.table, first)
            self.num_swaps += bool(moves)
            for move in moves:
                self.device[move.dst] = list(self.host[move.src])
            self.swapped.remove(sequence)
        sequence.num_computed = max(was_computed, cached.num_tokens)
        self.sequences.append(sequence)
        self._compute(sequence)
        return True

    def _check_difference(self, sequence: WrittenSequence, position: int | None) -> None:
        """What is said to be the first difference is where no cached sequence is as long alike."""
        if position is None:
            return
        tokens = tuple(sequence.tokens)
        same_salt = [key for salt, key in self.cached if salt == sequence.salt]
        assert any(key[:position] == tokens[:position] for key in same_salt)
        full = len(tokens[:-1]) // self.size * self.size
        assert position < full

    def _compute(self, sequence: WrittenSequence) -> None:
        for position in range(sequence.num_computed, len(sequence.tokens)):
            block_id = sequence.table.block_ids[position // self.size]
            self.device[block_id][position % self.size] = sequence.content(position)
        sequence.num_computed = len(sequence.tokens)
        sequence.prefix.extend(sequence.tokens)
        first = sequence.table.num_registered
        self.manager.register(sequence.table, sequence.prefix, sequence.num_computed)
        if self.manager.enable_prefix_caching:
            for place in range(first, sequence.num_computed // self.size):
                key = sequence.content((place + 1) * self.size - 1)
                self.cached.setdefault(key, sequence.table.block_ids[place])

    def _handed_out(self, block_ids) -> None:
        for block_id in block_ids:
            expected = self.empty.pop(0) if self.empty else self.evictable.pop(0)
            assert block_id == expected, f"block {block_id} was handed out before {expected}"
            self.cached = {key: cached for key, cached in self.cached.items() if cached != block_id}

    def _released(self, block_ids) -> None:
        held = {block_id for s in self.sequences for block_id in s.table.block_ids}
        kept = set(self.cached.values())
        for block_id in block_ids:
            if block_id not in held:
                (self.evictable if block_id in kept else self.empty).append(block_id)
