"""The life of a sequence: which queue it stands in, which blocks it holds, and what the runner still knows of it.

Every unfinished sequence stands in exactly one queue: for its grammar, waiting, preempted or running. Decides nothing:
who is admitted, preempted or ended is the planner's and the scheduler's choice. Tells the ledger what it does.
"""

from bisect import bisect_right, insort
from operator import attrgetter

from paged_cache.block_table import BlockTable
from paged_cache.manager import BlockManager, BlockMove
from paged_cache.prefix_cache import CachedPrefix, TokenPrefix
from scheduler.grammar import GrammarState
from scheduler.ledger import RequestLedger
from scheduler.output import FinishReason
from scheduler.policy import goes_before, serving_order
from scheduler.request import Request, Sequence, SequenceStatus
from scheduler.shares import TenantShares
from scheduler.waiting_queue import WaitingQueue


class SequenceQueues:
    """All unfinished requests and sequences. The lists are for reading; the methods alone move sequences."""

    def __init__(self, manager: BlockManager, max_num_seqs: int, ageing_seconds: float, ledger: RequestLedger) -> None:
        """Let at most `max_num_seqs` sequences hold blocks of `manager` at once."""
        self._manager = manager
        self._max_num_seqs = max_num_seqs
        self._ledger = ledger
        self.now = 0.0  # seconds since the epoch, as of the scheduler's last call
        self.shares = TenantShares()
        self.requests: dict[str, Request] = {}
        self.sequences: dict[int, Sequence] = {}  # by seq_id
        self.awaiting_grammar: dict[str, Sequence] = {}  # by request_id
        self.waiting = WaitingQueue(self.shares, ageing_seconds)  # first sequences of requests that did not begin
        self.preempted: list[Sequence] = []  # by serving_order; siblings and beams that found no room among them
        self.running: list[Sequence] = []  # in the order of admission
        self.known_to_runner: set[int] = set()  # seq_ids that a step has named; the scheduler adds to it
        self._forgotten_seq_ids: list[int] = []
        self._next_seq_id = 0
        self._num_deferred_tokens = 0  # of the prompts whose grammars are being compiled

    # --- who stands where ---

    @property
    def has_room(self) -> bool:
        """One more sequence may run."""
        return len(self.running) < self._max_num_seqs

    @property
    def num_queued_requests(self) -> int:
        """Requests that did not begin, those whose grammars are being compiled included."""
        return self.waiting.num_requests + len(self.awaiting_grammar)

    @property
    def num_queued_tokens(self) -> int:
        """Of their prompts."""
        return self.waiting.num_tokens + self._num_deferred_tokens

    @property
    def has_runnable(self) -> bool:
        """Some sequence runs, or waits for nothing but its admission."""
        return bool(self.running or self.preempted or len(self.waiting))

    def next_to_admit(self) -> Sequence | None:
        """Whose turn it is: preempted sequences before those that did not begin, but for the rules of `goes_before`."""
        waiting = self.waiting.head(self.now) if len(self.waiting) else None
        preempted = self._next_preempted()
        if preempted is None or waiting is None:
            return waiting if preempted is None else preempted
        classes = self.class_of(waiting), self.class_of(preempted)
        if classes[0] == classes[1] and preempted.idle_mates:  # it takes one of their places, and nobody else's
            return preempted
        return waiting if goes_before(waiting, preempted, classes, self.is_below_share) else preempted

    def class_of(self, sequence: Sequence) -> int:
        """Its priority as of now, as waiting has lifted it: for its admission, or for a part of the budget later."""
        return min(sequence.priority, self.waiting.priority_of(sequence, self.now))

    def is_below_share(self, tenant: str) -> bool:
        """One more running sequence would leave the tenant within its share of the sequence slots."""
        return (self.shares.num_running(tenant) + 1) * self.shares.num_active <= self._max_num_seqs

    def is_above_share(self, tenant: str) -> bool:
        """The tenant runs more sequences than its share of the slots, of which everybody has one at least."""
        num_running = self.shares.num_running(tenant)
        return num_running > 1 and num_running * self.shares.num_active > self._max_num_seqs

    # --- what moves them ---

    def add(self, request: Request) -> None:
        """Queue the first sequence of a new request."""
        self.requests[request.request_id] = request
        self.shares.enter(request.tenant)
        prefix = self._manager.new_prefix(request.tenant, request.cache_salt)
        sequence = self._new_sequence(request, list(request.prompt_token_ids), BlockTable(), prefix)
        if request.params.structured_output is None:
            self.waiting.add(sequence)
        else:
            sequence.status = SequenceStatus.WAITING_FOR_GRAMMAR
            self.awaiting_grammar[request.request_id] = sequence
            self._num_deferred_tokens += sequence.num_prompt_tokens
        self._ledger.queued(request, self.now)

    def provide_grammar(self, request_id: str, grammar: GrammarState) -> None:
        """Let a request wait for its admission that waited for its grammar; one that has ended is no error."""
        sequence = self.awaiting_grammar.pop(request_id, None)
        if sequence is not None:
            self._num_deferred_tokens -= sequence.num_prompt_tokens
            sequence.grammar = grammar
            sequence.status = SequenceStatus.WAITING
            self.waiting.add(sequence)
            self._ledger.waits(sequence.request, "behind_others", self.now)

    def start(self, sequence: Sequence, cached: CachedPrefix) -> tuple[BlockMove, ...]:
        """Let a sequence run that waited, in the blocks that its table holds by now; the first are cached ones.

        Returns:
            What is to be copied from the host before it is computed on: what was swapped out and is not cached.
        """
        moves: tuple[BlockMove, ...] = ()
        sequence.num_computed_tokens = cached.num_tokens
        if sequence.status is SequenceStatus.PREEMPTED:
            priority = self.class_of(sequence)
            self.preempted.remove(sequence)
            sequence.priority = priority
            if sequence.block_table.host_block_ids:
                moves = self._manager.swap_in(sequence.block_table, len(cached.block_ids))
                sequence.num_computed_tokens = max(cached.num_tokens, sequence.num_swapped_tokens)
                sequence.num_swapped_tokens = 0
        else:
            sequence.priority = self.class_of(sequence)
            self.waiting.remove(sequence)
        self._run(sequence)
        self._ledger.admitted(sequence, self.now, cached)
        return moves

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks, but for those it has on the host; the rest is computed again later."""
        self._leave_running(sequence)
        if not sequence.block_table.host_block_ids:
            self._manager.free(sequence.block_table)
        sequence.num_lost_tokens = max(sequence.num_lost_tokens, sequence.num_computed_tokens)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self._stand_among_preempted(sequence)

    def fork_siblings(self, sequence: Sequence) -> None:
        """Make the request's other n - 1 sequences out of the first, whose prompt is computed but for its last token.

        They share its blocks. Those beyond `max_num_seqs` wait their turn before requests that did not begin, and
        compute of the prompt for themselves what is not cached then: only running sequences hold blocks, so that the
        pool can always be won back.
        """
        while sequence.request.awaits_fork:
            self._fork(sequence, list(sequence.token_ids))
        for forked in list(sequence.request.sequences):
            if forked.index in sequence.request.aborted_indices:
                self.finish(forked)

    def branch(self, sequence: Sequence, token_id: int) -> Sequence:
        """A new sequence of the request that goes on from another one with a token, and shares its blocks.

        If that one has been preempted, or no sequence slot is left, the new one stands among the preempted.
        """
        branch = self._fork(sequence, [*sequence.token_ids, token_id])
        if branch.status is SequenceStatus.PREEMPTED:
            branch.num_lost_tokens = max(sequence.num_computed_tokens, sequence.num_lost_tokens)
        return branch

    def register(self, sequence: Sequence) -> None:
        """Let others find the blocks that are full of known and computed tokens."""
        if self._manager.enable_prefix_caching:
            num_tokens = min(sequence.num_computed_tokens, sequence.num_tokens)
            sequence.prefix.extend(sequence.token_ids)
            self._manager.register(sequence.block_table, sequence.prefix, num_tokens)

    def finish(self, sequence: Sequence, reason: FinishReason | None = "abort") -> None:
        """End a sequence, in whatever queue it stands, and its request with the last of its sequences.

        A beam that is given up has no reason: it was none of the answers.
        """
        request = sequence.request
        match sequence.status:
            case SequenceStatus.RUNNING:
                self.register(sequence)
                self._leave_running(sequence)
            case SequenceStatus.WAITING_FOR_GRAMMAR:
                del self.awaiting_grammar[request.request_id]
                self._num_deferred_tokens -= sequence.num_prompt_tokens
            case SequenceStatus.WAITING:
                self.waiting.remove(sequence)
            case SequenceStatus.PREEMPTED:
                self.preempted.remove(sequence)
            case SequenceStatus.FINISHED:
                raise AssertionError(f"sequence {sequence.seq_id} is finished twice")
        self._manager.free(sequence.block_table)
        sequence.status = SequenceStatus.FINISHED
        del self.sequences[sequence.seq_id]
        if reason is None:
            request.sequences.remove(sequence)
            self._ledger.given_up(sequence, self.now)
        else:
            self._ledger.ended(sequence, self.now, reason)
        if request.is_finished:
            self._forget(request)

    def end(self, request: Request) -> None:
        """End all that is left of a request."""
        for sequence in list(request.sequences):
            if sequence.status is not SequenceStatus.FINISHED:
                self.finish(sequence)
        if self.requests.get(request.request_id) is request:  # some of its sequences were never made
            self._forget(request)

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
        self.waiting.check_integrity()
        self._ledger.check_integrity()
        queued = [*self.awaiting_grammar.values(), *self.waiting, *self.preempted, *self.running]
        assert len(queued) == len(set(queued)) == len(self.sequences), "a sequence stands in no queue, or in two"
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING
            held = len(sequence.block_table)
            assert self._manager.num_blocks_for(sequence.num_computed_tokens) <= held, (
                f"sequence {sequence.seq_id} has {sequence.num_computed_tokens} computed tokens in {held} blocks"
            )
            assert sequence.num_uncomputed_tokens >= 0, f"sequence {sequence.seq_id} computed more than it has"
            assert not sequence.block_table.host_block_ids, f"sequence {sequence.seq_id} runs and is swapped out"
        assert self.preempted == sorted(self.preempted, key=serving_order), "the preempted are out of order"
        for sequence in [*self.awaiting_grammar.values(), *self.waiting, *self.preempted]:
            assert not sequence.block_table.block_ids, f"sequence {sequence.seq_id} waits and holds blocks"
            assert sequence.num_computed_tokens == 0
        for sequence in [*self.awaiting_grammar.values(), *self.waiting]:
            assert not sequence.block_table.host_block_ids, f"sequence {sequence.seq_id} is swapped out and did not run"
        assert self._num_deferred_tokens == sum(s.num_prompt_tokens for s in self.awaiting_grammar.values())
        assert len(self.running) <= self._max_num_seqs
        assert self.known_to_runner <= {s.seq_id for s in self.running}
        for tenant in {s.request.tenant for s in self.running}:
            assert self.shares.num_running(tenant) == sum(s.request.tenant == tenant for s in self.running)
        assert self.shares.num_active == len({request.tenant for request in self.requests.values()})

    def _next_preempted(self) -> Sequence | None:
        """Of those that stand first with their priorities, the one of the best class as waiting has lifted them."""
        first = []
        place = 0
        while place < len(self.preempted):  # thousands may stand there, of few priorities
            sequence = self.preempted[place]
            if sequence.has_work:
                first.append(sequence)
                place = bisect_right(self.preempted, sequence.priority, place, key=attrgetter("priority"))
            else:
                place += 1
        return min(first, key=self.class_of, default=None)

    def _new_sequence(
        self, request: Request, token_ids: list[int], table: BlockTable, prefix: TokenPrefix, num_computed: int = 0
    ) -> Sequence:
        sequence = Sequence(
            seq_id=self._next_seq_id,
            request=request,
            index=request.num_created_sequences,
            token_ids=token_ids,
            prefix=prefix,
            priority=request.priority,
            num_computed_tokens=num_computed,
            block_table=table,
        )
        if request.num_created_sequences == 0:
            request.first_seq_id = sequence.seq_id
        self._next_seq_id += 1
        request.num_created_sequences += 1
        self.sequences[sequence.seq_id] = sequence
        request.sequences.append(sequence)
        return sequence

    def _fork(self, sequence: Sequence, token_ids: list[int]) -> Sequence:
        shares_blocks = self.has_room and sequence.status is SequenceStatus.RUNNING
        num_computed = sequence.num_computed_tokens if shares_blocks else 0
        table = self._manager.fork(sequence.block_table, num_computed)
        forked = self._new_sequence(sequence.request, token_ids, table, sequence.prefix.fork(), num_computed)
        forked.priority = sequence.priority
        forked.grammar = None if sequence.grammar is None else sequence.grammar.fork()
        if shares_blocks:
            self._run(forked)
        else:
            self._stand_among_preempted(forked)
        return forked

    def _run(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        self.shares.started(sequence.request.tenant)

    def _stand_among_preempted(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.PREEMPTED
        insort(self.preempted, sequence, key=serving_order)

    def _leave_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.shares.stopped(sequence.request.tenant)
        if sequence.seq_id in self.known_to_runner:
            self.known_to_runner.discard(sequence.seq_id)
            self._forgotten_seq_ids.append(sequence.seq_id)

    def _forget(self, request: Request) -> None:
        del self.requests[request.request_id]
        self.shares.leave(request.tenant)
