"""The continuous-batching scheduler: three calls a step (`schedule`, then `update`), and `add` and `abort` between.

Owns every decision. Works iteration by iteration (Orca, OSDI 2022) over a paged cache (PagedAttention, SOSP 2023),
with prefill in chunks mixed into decode batches (Sarathi-Serve, OSDI 2024). One step may be scheduled ahead of the
result of the last. Must not know how tokens are computed, what they mean as text, or who asked.
"""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from paged_cache.manager import BlockManager, BlockMove
from scheduler.admission import RequestRefused, refuse_unservable
from scheduler.beam_search import advance_beams
from scheduler.config import SchedulerConfig
from scheduler.deadlines import Deadlines
from scheduler.grammar import GrammarState, MaskComputer, with_end_tokens
from scheduler.ledger import RequestLedger
from scheduler.output import (
    BlockCopy,
    DropCause,
    Dropped,
    GrammarMask,
    KnownRow,
    NewRow,
    RowResult,
    SchedulerOutput,
    SequenceUpdate,
    StepResult,
)
from scheduler.planner import Planner
from scheduler.pool_report import PoolReport, report_pool
from scheduler.queues import SequenceQueues
from scheduler.request import Request, Sequence, SequenceStatus
from scheduler.results import NOTHING_ACCEPTED, accept_tokens, build_update, unreported_scores
from scheduler.stats import SchedulerCounters, SchedulerStats
from scheduler.step_plan import StepPlan

_NO_UPDATES: SequenceOf[SequenceUpdate] = ()
MAX_STEPS_IN_FLIGHT = 2  # the one that runs, and the one that waits on the device behind it


class Scheduler:
    """Decides which tokens run in the next step. One token budget; decodes first, then prefill chunks.

    The invariant that lets `schedule` run ahead of `update`: steps execute in the order in which they were scheduled,
    each one's copies and writes before the next one's, and what a step schedules counts as computed at once. So
    - a block may be freed while steps that read or write it are still to run, since whoever gets it is scheduled
      later, and so copies into it, forks from it and writes to it later;
    - a block that is shared, cached, copied or swapped holds what its owner's steps so far have put there;
    - a sampled token whose id is not known yet is a place that the next step can compute, for the runner has the id.
    What is not known ahead is the end by a stop token, and whether a prompt's siblings are wanted: a sequence that has
    ended may have one row too many in a launched step, whose result is dropped, and siblings are forked by `update`.
    """

    def __init__(self, config: SchedulerConfig, manager: BlockManager) -> None:
        """Schedule over the blocks of `manager`, which nobody else may use."""
        self.ledger = RequestLedger(config.starving_seconds)
        self._config = config
        self._manager = manager
        self._queues = SequenceQueues(manager, config.max_num_seqs, config.ageing_seconds, self.ledger)
        self._counters = SchedulerCounters()
        self._planner = Planner(config, manager, self._queues, self.ledger, self._counters)
        self._in_flight: deque[SchedulerOutput] = deque()  # scheduled, not updated
        self._masks = MaskComputer()
        self._deadlines = Deadlines(self._queues.requests)
        self._dropped: list[Dropped] = []

    # --- between steps ---

    def add(self, request: Request, now: float = 0.0) -> None:
        """Queue a request. One for structured output waits until `provide_grammar` brings its grammar.

        Where the queue is full, the request that gives way is found by `take_dropped`: this one, or another.

        Args:
            request: with a time of arrival.
            now: seconds since the epoch, as in all the other calls.

        Raises:
            RequestRefused: if it could never run, even alone in an empty pool, or its id is in use.
        """
        if request.request_id in self._queues.requests:
            raise RequestRefused(
                f"The request id {request.request_id!r} is in use by an unfinished request.", "request_id"
            )
        refuse_unservable(request, self._config, self._manager)
        self._queues.now = now
        self._queues.add(request)
        self._deadlines.watch(request)
        self._bound_queue(request)

    def provide_grammar(self, request_id: str, grammar: GrammarState, now: float = 0.0) -> None:
        """Let a request run that waits for its grammar, whose beginning this is. One that has ended is no error."""
        self._queues.now = now
        self._queues.provide_grammar(request_id, grammar)

    def abort(self, request_id: str, index: int | None = None, now: float = 0.0) -> None:
        """End a request, or one of its sequences, in whatever state it is. An unknown one is no error: it has ended.

        Of a beam search, whose answers are known at its end alone, nothing less than the whole can be ended.
        """
        request = self._queues.requests.get(request_id)
        if request is None:
            return
        self._queues.now = now
        if request.params.beam_search is not None:
            index = None
        if request.awaits_fork and index is not None:
            # The first sequence still computes the prompt for all of them: the fork leaves this one out.
            request.aborted_indices.add(index)
            if len(request.aborted_indices) < request.params.n:
                return
            index = None
        if index is None:
            self._queues.end(request)
            return
        for sequence in list(request.sequences):
            if sequence.status is not SequenceStatus.FINISHED and sequence.index == index:
                self._queues.finish(sequence)

    def take_dropped(self) -> list[Dropped]:
        """The requests that were ended for want of room or time since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def drop_late(self, now: float) -> None:
        """End the requests whose time is over. Each step begins with it; call it too while nothing can run."""
        self._queues.now = now
        for request_id, first_seq_id, is_of_queue in self._deadlines.due(now):
            request = self._queues.requests.get(request_id)
            if request is None or request.first_seq_id != first_seq_id:  # it has ended
                continue
            waited = f"{max(0.0, now - request.arrival_time):.1f} s"
            if not is_of_queue:
                self._drop(request, "deadline", f"The answer was not complete after {waited}, when its time was over.")
            elif request.sequences[0].status in (SequenceStatus.WAITING, SequenceStatus.WAITING_FOR_GRAMMAR):
                self._drop(request, "queue_timeout", f"The request waited {waited} and no step had room for it.")

    @property
    def has_unfinished(self) -> bool:
        """Some sequence still waits or runs."""
        return bool(self._queues.sequences)

    @property
    def has_runnable(self) -> bool:
        """Some sequence runs, or could: a step has something to do, unless it waits for the result of another."""
        return self._queues.has_runnable

    @property
    def stats(self) -> SchedulerStats:
        """Counters and gauges as of now."""
        manager, queues, counters = self._manager, self._queues, self._counters
        return SchedulerStats(
            num_running=len(queues.running),
            num_waiting=len(queues.sequences) - len(queues.running),
            num_blocks=manager.num_blocks,
            num_used_blocks=manager.num_used_blocks,
            num_steps=counters.num_steps,
            num_preemptions=counters.num_preemptions,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_generation_tokens=counters.num_generation_tokens,
            num_recomputed_tokens=counters.num_recomputed_tokens,
            num_prefix_queries=counters.num_prefix_queries,
            num_prefix_hits=counters.num_prefix_hits,
            num_swapped_out_blocks=counters.num_swapped_out_blocks,
            num_swapped_in_blocks=counters.num_swapped_in_blocks,
            num_dropped_queue_full=counters.num_dropped_queue_full,
            num_dropped_queue_timeout=counters.num_dropped_queue_timeout,
            num_dropped_deadline=counters.num_dropped_deadline,
            num_deferred=len(queues.awaiting_grammar),
            num_queued_tokens=queues.num_queued_tokens,
            num_starving=self.ledger.num_starving,
            num_cached_blocks=manager.num_cached_blocks,
            num_evicted_blocks=manager.num_evicted_blocks,
            num_saved_blocks=manager.num_saved_blocks,
            num_host_blocks=manager.num_host_blocks,
            num_used_host_blocks=manager.num_used_host_blocks,
            num_evictable_blocks=manager.num_evictable_blocks,
            num_recomputed_prompt_tokens=counters.num_recomputed_prompt_tokens,
            num_shared_blocks=manager.num_shared_blocks,
            num_copied_blocks=counters.num_copied_blocks,
            num_empty_slots=manager.num_empty_slots((s.block_table, s.num_computed_tokens) for s in queues.running),
        )

    def report_pool(self) -> PoolReport:
        """Every block of the pool and who holds it, as of now. To be called between steps, and not at each."""
        return report_pool(self._manager, self._queues.running)

    def check_integrity(self) -> None:
        """Prove that blocks, block tables, queues and counters agree.

        Raises:
            AssertionError: saying what does not.
        """
        self._queues.check_integrity()
        for sequence in self._queues.sequences.values():
            num_rows = sum(any(row.seq_id == sequence.seq_id for row in output.rows) for output in self._in_flight)
            assert 0 <= sequence.num_pending_tokens <= num_rows, (
                f"sequence {sequence.seq_id} waits for {sequence.num_pending_tokens} tokens of {num_rows} steps"
            )

    # --- the step ---

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Choose the tokens of the next step and reserve their blocks.

        Running sequences come first, decodes before prefill chunks; when blocks run out one of them is
        preempted. Whatever budget is left admits preempted sequences, then waiting ones. Before the result of the
        last step is in, a step may have no rows: every sequence waits for that result.
        """
        assert len(self._in_flight) < MAX_STEPS_IN_FLIGHT, "a third step is scheduled before the first is updated"
        self.drop_late(now)
        is_first = not any(step.rows for step in self._in_flight)
        plan = self._planner.plan(must_progress=is_first)
        assert not (plan.is_empty and is_first and self.has_runnable), (
            "no progress: sequences wait and none was scheduled"
        )
        output = SchedulerOutput(
            rows=plan.rows(self._queues.known_to_runner),
            finished_seq_ids=self._queues.take_forgotten(),
            block_copies=plan.block_copies(),
            swapped_out=_as_copies(plan.swapped_out),
            swapped_in=_as_copies(plan.swapped_in),
            grammar_masks=self._grammar_masks(plan.sampling_grammars()),
        )
        self._commit(plan)
        self._queues.known_to_runner.update(row.seq_id for row in output.rows)
        self._in_flight.append(output)
        self._counters.num_steps += bool(output.rows)
        self._counters.num_copied_blocks += len(output.block_copies)
        return output

    def update(self, output: SchedulerOutput, result: StepResult, now: float = 0.0) -> list[SequenceUpdate]:
        """Take in what the oldest scheduled step brought: sampled tokens, forks, stop checks."""
        assert self._in_flight and output is self._in_flight[0], "steps are updated in the order of their scheduling"
        self._in_flight.popleft()
        self._queues.now = now
        updates: list[SequenceUpdate] = []
        for row, row_result in zip(output.rows, result.rows, strict=True):
            sequence = self._queues.sequences.get(row.seq_id)
            if sequence is None:  # aborted while the step ran, or ended by the step before
                continue
            updates += self._take_result(sequence, row, row_result)
        return updates

    # --- scheduling ---

    def _commit(self, plan: StepPlan) -> None:
        """Take the plan's tokens for computed: their blocks can be shared, and their tenants have had them."""
        block_size = self._manager.block_size
        shares = self._queues.shares
        is_charged = shares.are_compared
        for sequence, start in plan.commit():
            end = sequence.num_computed_tokens
            if start < sequence.num_lost_tokens:
                last = min(end, sequence.num_lost_tokens)
                sequence.num_recomputed_tokens += last - start
                self._counters.num_recomputed_tokens += last - start
                num_prompt = max(0, min(last, sequence.num_prompt_tokens) - start)
                self._counters.num_recomputed_prompt_tokens += num_prompt
            if end // block_size != start // block_size:
                self._queues.register(sequence)
            if is_charged and start < sequence.num_prompt_tokens:
                num_prompt = min(end, sequence.num_prompt_tokens) - start
                shares.charge(sequence.request.tenant, num_prompt_tokens=num_prompt)

    def _bound_queue(self, newcomer: Request) -> None:
        """Let requests give way until the queue is within its bounds, beyond what the next step could admit anyway.

        What waits already may be beyond them, since room that it had was taken by those that run: it stays, and a
        newcomer takes the place of others or goes.
        """
        config, queues, manager = self._config, self._queues, self._manager
        num_before = queues.num_queued_requests - 1
        num_tokens_before = queues.num_queued_tokens - len(newcomer.prompt_token_ids)
        max_requests = max(num_before, config.max_queued_requests + config.max_num_seqs - len(queues.running))
        max_tokens = max(num_tokens_before, config.max_queued_tokens + manager.num_free_blocks * manager.block_size)
        num_requests, num_tokens = queues.num_queued_requests, queues.num_queued_tokens
        leaving: list[tuple[Request, str]] = []
        giving_way = self._giving_way(newcomer)
        while num_requests > 1:
            if config.max_queued_requests and num_requests > max_requests:
                full = f"{num_before} requests wait already"
            elif config.max_queued_tokens and num_tokens > max_tokens:
                full = f"prompts of {num_tokens_before} tokens wait already"
            else:
                break
            request = next(giving_way)
            if request is newcomer:  # then nobody else leaves for it
                leaving = [(newcomer, full)]
                break
            leaving.append((request, full))
            num_requests -= 1
            num_tokens -= len(request.prompt_token_ids)
        for request, full in leaving:
            self._drop(request, "queue_full", f"The queue is full: {full}. Send the request again later.")

    def _giving_way(self, newcomer: Request) -> Iterator[Request]:
        """Who stands last in the full queue. One whose grammar is not compiled stands there by its priority alone."""
        is_deferred = newcomer.request_id in self._queues.awaiting_grammar
        for sequence in self._queues.waiting.giving_way():
            if is_deferred and sequence.request.priority <= newcomer.priority:
                break
            yield sequence.request
        yield newcomer

    def _drop(self, request: Request, cause: DropCause, message: str) -> None:
        dropped = Dropped(request.request_id, cause, message)
        self._dropped.append(dropped)
        match cause:
            case "queue_full":
                self._counters.num_dropped_queue_full += 1
            case "queue_timeout":
                self._counters.num_dropped_queue_timeout += 1
            case "deadline":
                self._counters.num_dropped_deadline += 1
        self._queues.end(request)
        self.ledger.dropped(request, dropped, self._queues.now)

    def _grammar_masks(self, sampling: list[tuple[int, Sequence, GrammarState]]) -> tuple[GrammarMask, ...]:
        """What rows may sample, given as (place in the step, sequence, grammar)."""
        if not sampling:
            return ()
        eos = self._config.eos_token_ids
        masks = []
        bitmasks = self._masks.bitmasks([grammar for _, _, grammar in sampling])
        for (place, sequence, grammar), bitmask in zip(sampling, bitmasks, strict=True):
            if grammar.may_end:
                params = sequence.request.params
                ends = (*params.stop_token_ids, *(() if params.ignore_eos else eos))
                bitmask = with_end_tokens(bitmask, ends, last_resort=eos)
            masks.append(GrammarMask(place, bitmask))
        return tuple(masks)

    # --- results ---

    def _take_result(self, sequence: Sequence, row: NewRow | KnownRow, result: RowResult) -> SequenceOf[SequenceUpdate]:
        scores = unreported_scores(sequence, row, result) if result.prompt_logprobs else ()
        accepted, answers = NOTHING_ACCEPTED, _NO_UPDATES
        if result.candidates or (result.is_dead_end and sequence.request.params.beam_search is not None):
            sequence.num_pending_tokens -= 1
            answers = advance_beams(sequence, result, self._queues, self._config.eos_token_ids)
            # A tenant pays for every beam's step, be there something of it in the answers or not.
            self._count_generated(sequence, sum(len(answer.token_ids) for answer in answers), num_charged=1)
        elif result.token_ids or result.is_dead_end or result.embedding:
            sequence.num_pending_tokens -= 1
            accepted = accept_tokens(sequence, result.token_ids, self._config.eos_token_ids)
            self._count_generated(sequence, len(accepted.token_ids), num_charged=len(accepted.token_ids))
            if accepted.finish_reason is not None:
                self._queues.finish(sequence, accepted.finish_reason)
        elif self._completes_shared_prompt(sequence, row):
            self._queues.fork_siblings(sequence)
        update = build_update(sequence, accepted, result, scores)
        return answers if update is None else (update, *answers)

    def _count_generated(self, sequence: Sequence, num_tokens: int, *, num_charged: int) -> None:
        self._counters.num_generation_tokens += num_tokens
        request = sequence.request
        if num_tokens and not request.has_token:
            request.has_token = True
            self.ledger.first_token(request, self._queues.now)
        if self._queues.shares.are_compared:
            self._queues.shares.charge(request.tenant, num_generated_tokens=num_charged)

    def _completes_shared_prompt(self, sequence: Sequence, row: NewRow | KnownRow) -> bool:
        """The row computed the last token that the siblings share, and its blocks were not taken since."""
        return (
            sequence.request.awaits_fork
            and row.end == sequence.num_prompt_tokens - 1
            and sequence.status is SequenceStatus.RUNNING
        )


def _as_copies(moves: list[BlockMove]) -> tuple[BlockCopy, ...]:
    return tuple(BlockCopy(move.src, move.dst) for move in moves)
