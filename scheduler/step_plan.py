"""The step being put together: what each sequence computes, and what changed in its block table.

Turns itself into the rows of a SchedulerOutput. Decides nothing, and changes no sequence before it is final.
"""

from collections.abc import Iterable, Set

from paged_cache.manager import Allocation, BlockMove, CopyOnWrite
from scheduler.grammar import GrammarState
from scheduler.output import BlockCopy, KnownRow, NewRow
from scheduler.request import Sequence

_NO_CHANGE = Allocation((), None)


class StepPlan:
    """Sequences with the tokens they compute, under one token budget."""

    def __init__(self, budget: int) -> None:
        """Begin a step of at most `budget` tokens."""
        self.budget = budget  # tokens left
        self.preempted = False  # a sequence gave way: nobody is admitted in this step
        self.swapped_out: list[BlockMove] = []
        self.swapped_in: list[BlockMove] = []
        self._planned: dict[Sequence, tuple[int, Allocation]] = {}
        self._looking_back: set[Sequence] = set()  # planned ones that the runner must be told the tokens of
        self._has_chunks = False  # some row may have more than one token, or a copy to be made: else nothing is looked
        self._has_copies = False  # for among the rows, of which there may be thousands

    @property
    def is_empty(self) -> bool:
        """No sequence computes anything."""
        return not self._planned

    def add(self, sequence: Sequence, num_new_tokens: int, allocation: Allocation) -> None:
        """Let a sequence compute its next tokens into blocks that it holds by now."""
        assert num_new_tokens > 0, f"sequence {sequence.seq_id} is scheduled for no token"
        self._planned[sequence] = (num_new_tokens, allocation)
        self.budget -= num_new_tokens
        if num_new_tokens > 1:
            self._has_chunks = True
        if allocation.copy_on_write is not None:
            self._has_copies = True
        if sequence.request.looks_back:
            self._looking_back.add(sequence)

    def extend(self, sequence: Sequence, num_new_tokens: int) -> None:
        """Let a sequence compute more tokens of those that its blocks have room for."""
        num_planned, allocation = self._planned.get(sequence, (0, _NO_CHANGE))
        self._planned.pop(sequence, None)
        self.add(sequence, num_planned + num_new_tokens, allocation)
        self.budget += num_planned

    def num_tokens_of(self, sequence: Sequence) -> int:
        """Tokens that it computes in this step."""
        return self._planned.get(sequence, (0, None))[0]

    def drop(self, sequence: Sequence) -> CopyOnWrite | None:
        """Take a preempted sequence out again, and its copies with it: their destinations are free for others.

        Returns:
            Its copy-on-write that will not take place: what it holds is still in the source.
        """
        self.preempted = True
        num_new_tokens, allocation = self._planned.pop(sequence, (0, _NO_CHANGE))
        self._looking_back.discard(sequence)
        self.budget += num_new_tokens
        if self.swapped_in:  # in this step, perhaps for this sequence: others may get the blocks
            held = set(sequence.block_table.block_ids)
            self.swapped_in = [move for move in self.swapped_in if move.dst not in held]
        return allocation.copy_on_write

    def rows(self, known_to_runner: Set[int]) -> tuple[NewRow | KnownRow, ...]:
        """The rows in the order of the batch: decodes first."""
        looking_back = self._looking_back
        return tuple(
            _known_row(sequence, num_new, allocation, looks_back=bool(looking_back) and sequence in looking_back)
            if sequence.seq_id in known_to_runner
            else _new_row(sequence, num_new)
            for sequence, (num_new, allocation) in self._in_order()
        )

    def sampling_grammars(self) -> list[tuple[int, Sequence, GrammarState]]:
        """The rows whose next token is sampled under a grammar, with their places in the step."""
        if not self._looking_back:
            return []
        return [
            (place, sequence, sequence.grammar)
            for place, (sequence, (num_new_tokens, _)) in enumerate(self._in_order())
            if sequence.grammar is not None and sequence.num_computed_tokens + num_new_tokens == sequence.num_tokens
        ]

    def block_copies(self) -> tuple[BlockCopy, ...]:
        """The copies that the rows' blocks need before the step writes."""
        if not self._has_copies:
            return ()
        copied = (allocation.copy_on_write for _, allocation in self._planned.values())
        return tuple(BlockCopy(copy.src, copy.dst) for copy in copied if copy is not None)

    def _in_order(self) -> Iterable[tuple[Sequence, tuple[int, Allocation]]]:
        """Decodes first, each with its tokens and blocks."""
        if not self._has_chunks:
            return self._planned.items()
        return sorted(self._planned.items(), key=lambda item: item[1][0] > 1)

    def commit(self) -> list[tuple[Sequence, int]]:
        """Count the planned tokens as computed: whatever is scheduled later comes later on the device too.

        Returns:
            The sequences, each with the number of its tokens that were computed before.
        """
        before = []
        for sequence, (num_new_tokens, _) in self._planned.items():
            before.append((sequence, sequence.num_computed_tokens))
            sequence.num_computed_tokens += num_new_tokens
            if sequence.has_computed_all:
                sequence.num_pending_tokens += 1
        for sequence in self._looking_back:
            sequence.num_sent_tokens = sequence.num_tokens
        return before


def _known_row(sequence: Sequence, num_new_tokens: int, allocation: Allocation, *, looks_back: bool) -> KnownRow:
    copied = allocation.copy_on_write
    return KnownRow(
        seq_id=sequence.seq_id,
        new_block_ids=allocation.new_block_ids,
        replaced_block=None if copied is None else (copied.position, copied.dst),
        num_computed_tokens=sequence.num_computed_tokens,
        num_new_tokens=num_new_tokens,
        sampled_token_ids=tuple(sequence.token_ids[sequence.num_sent_tokens :]) if looks_back else (),
    )


def _new_row(sequence: Sequence, num_new_tokens: int) -> NewRow:
    assert sequence.num_pending_tokens == 0, f"sequence {sequence.seq_id} is sent whole, and a token of it is not known"
    return NewRow(
        seq_id=sequence.seq_id,
        index=sequence.index,
        token_ids=tuple(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        params=sequence.request.params,
        block_ids=tuple(sequence.block_table.block_ids),
        num_computed_tokens=sequence.num_computed_tokens,
        num_new_tokens=num_new_tokens,
    )
