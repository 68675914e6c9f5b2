"""The continuous-batching scheduler: three calls a step (`schedule`, then `update`), and `add` and `abort` between.

Owns every decision. Works iteration by iteration (Orca, OSDI 2022) over a paged cache (PagedAttention, SOSP 2023),
with prefill in chunks mixed into decode batches (Sarathi-Serve, OSDI 2024). One step may be scheduled ahead of the
result of the last. Must not know how tokens are computed, what they mean as text, or who asked.
"""

from collections import deque

from paged_cache.manager import BlockManager
from scheduler.admission import RequestRefused, refuse_unservable
from scheduler.config import SchedulerConfig
from scheduler.grammar import GrammarState, MaskComputer, with_end_tokens
from scheduler.output import GrammarMask, KnownRow, NewRow, RowResult, SchedulerOutput, SequenceUpdate, StepResult
from scheduler.policy import choose_victim
from scheduler.queues import SequenceQueues
from scheduler.request import Request, Sequence, SequenceStatus
from scheduler.results import AcceptedTokens, accept_tokens, build_update, unreported_scores
from scheduler.stats import SchedulerCounters, SchedulerStats
from scheduler.step_plan import StepPlan

MAX_STEPS_IN_FLIGHT = 2  # the one that runs, and the one that waits on the device behind it


class Scheduler:
    """Decides which tokens run in the next step. One token budget; decodes first, then prefill chunks.

    The invariant that lets `schedule` run ahead of `update`: steps execute in the order in which they were scheduled,
    each one's copies and writes before the next one's, and what a step schedules counts as computed at once. So
    - a block may be freed while steps that read or write it are still to run, since whoever gets it is scheduled
      later, and so copies into it, forks from it and writes to it later;
    - a block that is shared or copied (fork, copy-on-write) holds what its owner's steps so far have put there;
    - a sampled token whose id is not known yet is a place that the next step can compute, for the runner has the id.
    What is not known ahead is the end by a stop token, and whether a prompt's siblings are wanted: a sequence that has
    ended may have one row too many in a launched step, whose result is dropped, and siblings are forked by `update`.
    """

    def __init__(self, config: SchedulerConfig, manager: BlockManager) -> None:
        """Schedule over the blocks of `manager`, which nobody else may use."""
        self._config = config
        self._manager = manager
        self._queues = SequenceQueues(manager, config.max_num_seqs)
        self._in_flight: deque[SchedulerOutput] = deque()  # scheduled, not updated
        self._counters = SchedulerCounters()
        self._masks = MaskComputer()

    # --- between steps ---

    def add(self, request: Request) -> None:
        """Queue a request. One for structured output waits until `provide_grammar` brings its grammar.

        Raises:
            RequestRefused: if it could never run, even alone in an empty pool, or its id is in use.
        """
        if request.request_id in self._queues.requests:
            raise RequestRefused(
                f"The request id {request.request_id!r} is in use by an unfinished request.", "request_id"
            )
        refuse_unservable(request, self._config, self._manager)
        self._queues.add(request)

    def provide_grammar(self, request_id: str, grammar: GrammarState) -> None:
        """Let a request run that waits for its grammar, whose beginning this is. One that has ended is no error."""
        self._queues.provide_grammar(request_id, grammar)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences, in whatever state it is. An unknown one is no error: it has ended."""
        request = self._queues.requests.get(request_id)
        if request is None:
            return
        if request.awaits_fork and index is not None:
            # The first sequence still computes the prompt for all of them: the fork leaves this one out.
            request.aborted_indices.add(index)
            if len(request.aborted_indices) < request.params.n:
                return
            index = None
        whole = index is None
        for sequence in list(request.sequences):
            if sequence.status is not SequenceStatus.FINISHED and (whole or sequence.index == index):
                self._queues.finish(sequence)
        if whole:
            self._queues.requests.pop(request_id, None)

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
        counters = self._counters
        return SchedulerStats(
            num_running=len(self._queues.running),
            num_waiting=len(self._queues.sequences) - len(self._queues.running),
            num_blocks=self._manager.num_blocks,
            num_used_blocks=self._manager.num_used_blocks,
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
            num_deferred=len(self._queues.awaiting_grammar),
            num_queued_tokens=0,
            num_starving=0,
            num_cached_blocks=0,
            num_evicted_blocks=0,
            num_saved_blocks=0,
            num_host_blocks=0,
            num_used_host_blocks=0,
        )

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

    def schedule(self) -> SchedulerOutput:
        """Choose the tokens of the next step and reserve their blocks.

        Running sequences come first, decodes before prefill chunks; when blocks run out one of them is
        preempted. Whatever budget is left admits preempted sequences, then waiting ones. Before the result of the
        last step is in, a step may have no rows: every sequence waits for that result.
        """
        assert len(self._in_flight) < MAX_STEPS_IN_FLIGHT, "a third step is scheduled before the first is updated"
        plan = StepPlan(self._config.max_num_batched_tokens)
        num_uncomputed = {sequence: sequence.num_uncomputed_tokens for sequence in self._queues.running}
        # A stable sort: within decodes and within chunks the order of admission stands.
        for sequence in sorted(num_uncomputed, key=lambda s: num_uncomputed[s] > 1):
            if plan.budget == 0:
                break
            if num_uncomputed[sequence] > 0 and sequence.status is SequenceStatus.RUNNING:
                self._plan_running(sequence, num_uncomputed[sequence], plan)
        if not plan.preempted:
            self._admit(plan)
        assert not plan.is_empty or not self.has_runnable or any(step.rows for step in self._in_flight), (
            "no progress: sequences wait and none was scheduled"
        )
        output = SchedulerOutput(
            plan.rows(self._queues.known_to_runner),
            self._queues.take_forgotten(),
            plan.block_copies(),
            self._grammar_masks(plan.sampling_grammars()),
        )
        plan.commit()
        self._queues.known_to_runner.update(row.seq_id for row in output.rows)
        self._in_flight.append(output)
        self._counters.num_steps += bool(output.rows)
        return output

    def update(self, output: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        """Take in what the oldest scheduled step brought: sampled tokens, forks, stop checks."""
        assert self._in_flight and output is self._in_flight[0], "steps are updated in the order of their scheduling"
        self._in_flight.popleft()
        updates = []
        for row, row_result in zip(output.rows, result.rows, strict=True):
            sequence = self._queues.sequences.get(row.seq_id)
            if sequence is None:  # aborted while the step ran, or ended by the step before
                continue
            update = self._take_result(sequence, row, row_result)
            if update is not None:
                updates.append(update)
        return updates

    # --- scheduling ---

    def _chunk_size(self, num_uncomputed_tokens: int, budget: int) -> int:
        cap = self._config.long_prefill_token_threshold or budget
        return min(num_uncomputed_tokens, budget, cap)

    def _plan_running(self, sequence: Sequence, num_uncomputed_tokens: int, plan: StepPlan) -> None:
        num_new = self._chunk_size(num_uncomputed_tokens, plan.budget)
        end = sequence.num_computed_tokens + num_new
        while (allocation := self._manager.allocate(sequence.block_table, sequence.num_computed_tokens, end)) is None:
            victim = choose_victim(self._queues.running, self._config.max_preemptions)
            self._preempt(victim, plan)
            if victim is sequence:
                return
        plan.add(sequence, num_new, allocation)

    def _admit(self, plan: StepPlan) -> None:
        """Admit while budget, sequence slots and blocks last: preempted sequences first, then by priority and arrival.

        A sequence is admitted only if all its known tokens fit now: two half-computed prompts can then never
        hold what the other needs. One block per running sequence is kept back, so that the next decodes do not
        preempt the newcomer at once.
        """
        while plan.budget > 0 and self._queues.has_room:
            sequence = self._queues.next_to_admit()
            if sequence is None:
                return
            needed = self._manager.num_blocks_for(sequence.num_tokens)
            if needed + len(self._queues.running) > self._manager.num_free_blocks:
                return
            allocation = self._manager.allocate(sequence.block_table, 0, sequence.num_tokens)
            assert allocation is not None
            if sequence.status is SequenceStatus.WAITING and sequence.index == 0:
                self._counters.num_prompt_tokens += sequence.num_prompt_tokens
            self._queues.start(sequence)
            if sequence.num_uncomputed_tokens == 0:  # n > 1 and a prompt of one token: nothing to share
                self._queues.fork_siblings(sequence)
                if sequence.status is SequenceStatus.FINISHED:  # aborted; the first of those left takes its place
                    heir = next((s for s in sequence.request.sequences if s in self._queues.running), None)
                    if heir is not None:
                        self._plan_running(heir, heir.num_uncomputed_tokens, plan)
                    continue
            plan.add(sequence, self._chunk_size(sequence.num_uncomputed_tokens, plan.budget), allocation)

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        """Take a running sequence's blocks, and its row out of this step; its tokens are recomputed later.

        A token of it that a launched step samples is not lost: `update` appends it, and the recompute reads it.
        """
        plan.drop(sequence)
        self._counters.num_preemptions += 1
        self._counters.num_recomputed_tokens += sequence.num_computed_tokens
        self._queues.preempt(sequence)

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

    def _take_result(self, sequence: Sequence, row: NewRow | KnownRow, result: RowResult) -> SequenceUpdate | None:
        scores = unreported_scores(sequence, row, result) if result.prompt_logprobs else ()
        accepted = AcceptedTokens()
        if result.token_ids or result.is_dead_end or result.embedding:
            sequence.num_pending_tokens -= 1
            accepted = accept_tokens(sequence, result.token_ids, self._config.eos_token_ids)
            self._counters.num_generation_tokens += len(accepted.token_ids)
            if accepted.finish_reason is not None:
                self._queues.finish(sequence)
        elif self._completes_shared_prompt(sequence, row):
            self._queues.fork_siblings(sequence)
        return build_update(sequence, accepted, result, scores)

    def _completes_shared_prompt(self, sequence: Sequence, row: NewRow | KnownRow) -> bool:
        """The row computed the last token that the siblings share, and its blocks were not taken since."""
        return (
            sequence.request.awaits_fork
            and row.end == sequence.num_prompt_tokens - 1
            and sequence.status is SequenceStatus.RUNNING
        )
