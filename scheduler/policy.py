"""Who gives way when room runs out, who goes first, and what a preemption costs. Moves no sequence and frees no block.

The rules: the lowest class gives way first, inside it whoever loses the least work; nobody for ever; for the sake of
priority only those of a lower class, for the sake of fairness only those of a tenant above its share.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Set
from heapq import heappop, heappush, heapreplace
from typing import TypeAlias

from paged_cache.manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.request import Sequence

_Order: TypeAlias = tuple[bool, int, int, float, int]


class Victims:
    """Those that run, in the order in which they give way for blocks.

    First who frees blocks at the least loss: of the lowest class, with the least work that only it holds. One that
    would free no block is taken only if no other is left. One that was preempted `max_preemptions` times and would lose
    work again is spared while another is left, whatever its class: the one with the most work done is therefore never
    taken for good, and each step brings it closer to its end: no livelock. (Preemption: PagedAttention paper,
    section 4.5.)

    Holds until a sequence is admitted, forked or computed: till then what one holds alone only gets more. So each is
    looked at once, and again when its turn has come: of thousands that run, hundreds may give way in one step.
    """

    def __init__(self, running: Iterable[Sequence], manager: BlockManager, max_preemptions: int) -> None:
        """Find the order among `running`, whose blocks are of `manager`."""
        self._manager = manager
        self._max_preemptions = max_preemptions
        self._others = list(running)  # who freed no block when last looked at
        self._freeing: list[tuple[_Order, Sequence]] = []  # a heap; the orders may lag behind

    def take(self) -> Sequence:
        """The next to give way, who is not among them any more; there must be one."""
        others = []
        for sequence in self._others:
            if self._manager.num_reclaimable_blocks(sequence.block_table):
                heappush(self._freeing, (self._order(sequence), sequence))
            else:
                others.append(sequence)
        self._others = others
        while self._freeing:
            known, sequence = self._freeing[0]
            order = self._order(sequence)
            if order == known:
                heappop(self._freeing)
                return sequence
            heapreplace(self._freeing, (order, sequence))
        victim = min(self._others, key=self._order)
        self._others.remove(victim)
        return victim

    def _order(self, sequence: Sequence) -> _Order:
        is_spared = sequence.num_preemptions >= self._max_preemptions and sequence.num_computed_tokens > 0
        return is_spared, *preemption_order(sequence, self._manager)


def preemption_order(sequence: Sequence, manager: BlockManager) -> tuple[int, int, float, int]:
    """Sort key of sequences that may give way: the lowest class first, the least work lost, the latest arrival."""
    return (
        -sequence.priority,
        num_lost_tokens(sequence, manager),
        -sequence.request.arrival_time,
        -sequence.seq_id,
    )


def num_lost_tokens(sequence: Sequence, manager: BlockManager) -> int:
    """Computed tokens that its preemption would throw away: those in blocks that others hold too are not lost."""
    return sequence.num_computed_tokens - min(
        sequence.num_computed_tokens, manager.num_shared_tokens(sequence.block_table)
    )


def least_that_make_room(
    candidates: Collection[Sequence],
    num_blocks_short: int,
    manager: BlockManager,
    *,
    needs_slot: bool,
    needed_blocks: Set[int] = frozenset(),
    num_spare: int = 0,
) -> list[Sequence]:
    """The first of the candidates that together free enough blocks, and a sequence slot if one is needed.

    Nobody, if all of them would not be enough: a preemption that makes no room is work lost for nothing. Blocks that
    several share are free only with the last of them: they count where those that are held by one are not enough.

    Args:
        candidates: in the order in which they are to give way.
        num_blocks_short: blocks that are missing.
        manager: of their blocks.
        needs_slot: one must give way even if no block is missing.
        needed_blocks: those that make no room, for whoever is to be admitted shares them.
        num_spare: free blocks that are kept back for each running sequence, and no longer when it has given way.
    """
    for counts_shared in (False, True):
        chosen: list[Sequence] = []
        num_short = num_blocks_short
        given_up: Counter[int] = Counter()
        for sequence in candidates:
            if num_short <= 0 and (chosen or not needs_slot):
                break
            if counts_shared or needed_blocks:
                held = given_up if counts_shared else Counter[int]()
                num_freed = manager.num_freed_blocks(sequence.block_table, held, needed_blocks)
            else:
                num_freed = manager.num_reclaimable_blocks(sequence.block_table)
            if num_freed or needs_slot or counts_shared:
                chosen.append(sequence)
                num_short -= num_freed + num_spare
        if num_short <= 0 and (chosen or not needs_slot):
            return chosen
        if manager.num_saved_blocks == 0:
            break
    return []


def is_swap_cheaper(sequence: Sequence, manager: BlockManager, config: SchedulerConfig) -> bool:
    """Copying its blocks to the host and back takes less time than computing them again, as measured at the start.

    Where blocks cost the same to copy, long sequences are swapped and short ones computed again: attention aside, both
    grow with the length, but a copy has no fixed part. (PagedAttention paper, section 7.3.)
    """
    num_blocks = manager.num_blocks_for(sequence.num_computed_tokens)
    swap = 2 * num_blocks * config.swap_seconds_per_block
    return swap < num_lost_tokens(sequence, manager) * config.recompute_seconds_per_token


def serving_order(sequence: Sequence) -> tuple[int, float, int, int]:
    """Sort key of sequences of a tenant: by priority, then by arrival; siblings stand together."""
    request = sequence.request
    return sequence.priority, request.arrival_time, request.first_seq_id, sequence.index


def goes_before(
    waiting: Sequence, preempted: Sequence, classes: tuple[int, int], is_below_share: Callable[[str], bool]
) -> bool:
    """A request that waits for its first admission goes before a preempted sequence, which else comes first.

    Args:
        waiting: the request whose turn it is.
        preempted: the preempted sequence whose turn it is.
        classes: their priorities, as waiting has lifted them.
        is_below_share: whether one more sequence of a tenant would leave it within its fair share.
    """
    if classes[0] != classes[1]:
        return classes[0] < classes[1]
    return is_below_share(waiting.request.tenant) and not is_below_share(preempted.request.tenant)
