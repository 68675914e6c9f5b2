"""The life of a sequence: which queue it stands in, which blocks it holds, and what the runner still knows of it.

Every unfinished sequence stands in exactly one queue: for its grammar, waiting, preempted or running. Decides nothing:
who is admitted, preempted or ended is the scheduler's choice.
"""

from bisect import insort

from paged_cache.block_table import BlockTable
from paged_cache.manager import BlockManager
from scheduler.grammar import GrammarState
from scheduler.policy import serving_order
from scheduler.request import Request, Sequence, SequenceStatus


class SequenceQueues:
    """All unfinished requests and sequences. The lists are for reading; the methods alone move sequences."""

    def __init__(self, manager: BlockManager, max_num_seqs: int) -> None:
        """Let at most `max_num_seqs` sequences hold blocks of `manager` at once."""
        self._manager = manager
        self._max_num_seqs = max_num_seqs
        self.requests: dict[str, Request] = {}
        self.sequences: dict[int, Sequence] = {}  # by seq_id
        self.awaiting_grammar: dict[str, Sequence] = {}  # by request_id
        self.waiting: list[Sequence] = []  # by serving_order
        self.preempted: list[Sequence] = []  # by serving_order
        self.running: list[Sequence] = []  # in the order of admission
        self.known_to_runner: set[int] = set()  # seq_ids that a step has named; the scheduler adds to it
        self._forgotten_seq_ids: list[int] = []
        self._next_seq_id = 0

    @property
    def has_room(self) -> bool:
        """One more sequence may run."""
        return len(self.running) < self._max_num_seqs

    def add(self, request: Request) -> None:
        """Queue the first sequence of a new request."""
        self.requests[request.request_id] = request
        sequence = self._new_sequence(request, BlockTable(), num_computed_tokens=0)
        if request.params.structured_output is None:
            insort(self.waiting, sequence, key=serving_order)
        else:
            sequence.status = SequenceStatus.WAITING_FOR_GRAMMAR
            self.awaiting_grammar[request.request_id] = sequence

    def provide_grammar(self, request_id: str, grammar: GrammarState) -> None:
        """Let a request wait for its admission that waited for its grammar; one that has ended is no error."""
        sequence = self.awaiting_grammar.pop(request_id, None)
        if sequence is not None:
            sequence.grammar = grammar
            sequence.status = SequenceStatus.WAITING
            insort(self.waiting, sequence, key=serving_order)

    @property
    def has_runnable(self) -> bool:
        """Some sequence runs, or waits for nothing but its admission."""
        return bool(self.running or self.waiting or self.preempted)

    def next_to_admit(self) -> Sequence | None:
        """The head of the queues: preempted sequences first, then those that wait."""
        if self.preempted:
            return self.preempted[0]
        return self.waiting[0] if self.waiting else None

    def start(self, sequence: Sequence) -> None:
        """Let the head of the queues run."""
        if sequence.status is SequenceStatus.PREEMPTED:
            self.preempted.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks; its tokens are recomputed later."""
        self._leave_running(sequence)
        sequence.num_recomputed_tokens += sequence.num_computed_tokens
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.PREEMPTED
        insort(self.preempted, sequence, key=serving_order)

    def fork_siblings(self, sequence: Sequence) -> None:
        """Make the request's other n - 1 sequences out of the first, whose prompt is computed but for its last token.

        They share its blocks. Those beyond `max_num_seqs` wait their turn before later requests and compute the
        prompt for themselves: a waiting sequence holds no blocks, so that the pool can always be won back.
        """
        request = sequence.request
        num_computed = sequence.num_computed_tokens
        while request.awaits_fork:
            if self.has_room:
                sibling = self._new_sequence(
                    request, self._manager.fork(sequence.block_table, num_computed), num_computed
                )
                sibling.status = SequenceStatus.RUNNING
                self.running.append(sibling)
            else:
                sibling = self._new_sequence(request, BlockTable(), num_computed_tokens=0)
                insort(self.waiting, sibling, key=serving_order)
            if sequence.grammar is not None:
                sibling.grammar = sequence.grammar.fork()
        for forked in request.sequences:
            if forked.index in request.aborted_indices:
                self.finish(forked)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, in whatever queue it stands, and its request with the last of its sequences."""
        match sequence.status:
            case SequenceStatus.RUNNING:
                self._leave_running(sequence)
            case SequenceStatus.WAITING_FOR_GRAMMAR:
                del self.awaiting_grammar[sequence.request.request_id]
            case SequenceStatus.WAITING:
                self.waiting.remove(sequence)
            case SequenceStatus.PREEMPTED:
                self.preempted.remove(sequence)
            case SequenceStatus.FINISHED:
                raise AssertionError(f"sequence {sequence.seq_id} is finished twice")
        sequence.status = SequenceStatus.FINISHED
        del self.sequences[sequence.seq_id]
        if sequence.request.is_finished:
            self.requests.pop(sequence.request.request_id, None)

    def take_forgotten(self) -> tuple[int, ...]:
        """Sequences that the runner knows and that stopped running since the last call."""
        forgotten, self._forgotten_seq_ids = tuple(self._forgotten_seq_ids), []
        return forgotten

    def check_integrity(self) -> None:
        """Prove that blocks, block tables, queues and counters agree.

        Raises:
            AssertionError: saying what does not.
        """
        self._manager.check_integrity(s.block_table for s in self.sequences.values())
        queued = [*self.awaiting_grammar.values(), *self.waiting, *self.preempted, *self.running]
        assert len(queued) == len(set(queued)) == len(self.sequences), "a sequence stands in no queue, or in two"
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING
            held = len(sequence.block_table)
            assert self._manager.num_blocks_for(sequence.num_computed_tokens) <= held, (
                f"sequence {sequence.seq_id} has {sequence.num_computed_tokens} computed tokens in {held} blocks"
            )
            assert sequence.num_uncomputed_tokens >= 0, f"sequence {sequence.seq_id} computed more than it has"
        for queue in (self.waiting, self.preempted):
            assert queue == sorted(queue, key=serving_order), "a queue is out of order"
        for sequence in [*self.awaiting_grammar.values(), *self.waiting, *self.preempted]:
            assert not sequence.block_table.block_ids, f"sequence {sequence.seq_id} waits and holds blocks"
            assert sequence.num_computed_tokens == 0
        assert len(self.running) <= self._max_num_seqs
        assert self.known_to_runner <= {s.seq_id for s in self.running}

    def _new_sequence(self, request: Request, table: BlockTable, num_computed_tokens: int) -> Sequence:
        sequence = Sequence(
            seq_id=self._next_seq_id,
            request=request,
            index=len(request.sequences),
            token_ids=list(request.prompt_token_ids),
            num_computed_tokens=num_computed_tokens,
            block_table=table,
        )
        self._next_seq_id += 1
        self.sequences[sequence.seq_id] = sequence
        request.sequences.append(sequence)
        return sequence

    def _leave_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._manager.free(sequence.block_table)
        if sequence.seq_id in self.known_to_runner:
            self.known_to_runner.discard(sequence.seq_id)
            self._forgotten_seq_ids.append(sequence.seq_id)
