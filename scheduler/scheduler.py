"""The continuous-batching scheduler: three calls a step (`schedule`, then `update`), and `add` and `abort` between.

Owns every change of a sequence. Works iteration by iteration (Orca, OSDI 2022) over a paged cache
(PagedAttention, SOSP 2023), with prefill in chunks mixed into decode batches (Sarathi-Serve, OSDI 2024).
Must not know how tokens are computed, what they mean as text, or who asked.
"""

from collections import deque
from dataclasses import dataclass, field

from paged_cache.block_table import BlockTable
from paged_cache.manager import Allocation, BlockManager
from scheduler.admission import RequestRefused, refuse_unservable
from scheduler.config import SchedulerConfig
from scheduler.output import (
    BlockCopy,
    FinishReason,
    KnownRow,
    NewRow,
    RowResult,
    SchedulerOutput,
    SequenceUpdate,
    StepResult,
    TokenLogprobs,
)
from scheduler.policy import choose_victim, resume_order
from scheduler.request import Request, Sequence, SequenceStatus
from scheduler.sampling_params import SamplingParams
from scheduler.stats import SchedulerCounters, SchedulerStats


@dataclass(slots=True)
class _Step:
    """The step being put together: what each sequence computes, and what changed in its block table."""

    budget: int
    num_new_tokens: dict[Sequence, int] = field(default_factory=dict)
    allocations: dict[Sequence, Allocation] = field(default_factory=dict)
    preempted: bool = False


class Scheduler:
    """Decides which tokens run in the next step. One token budget; decodes first, then prefill chunks."""

    def __init__(self, config: SchedulerConfig, manager: BlockManager) -> None:
        """Schedule over the blocks of `manager`, which nobody else may use."""
        self._config = config
        self._manager = manager
        self._requests: dict[str, Request] = {}
        self._sequences: dict[int, Sequence] = {}  # every unfinished sequence by seq_id
        self._waiting: deque[Sequence] = deque()
        self._preempted: list[Sequence] = []  # by resume_order
        self._running: list[Sequence] = []  # in the order of admission
        self._known_to_runner: set[int] = set()
        self._forgotten_seq_ids: list[int] = []  # to be named in the next output
        self._next_seq_id = 0
        self._counters = SchedulerCounters()

    # --- between steps ---

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestRefused: if it could never run, even alone in an empty pool, or its id is in use.
        """
        if request.request_id in self._requests:
            raise RequestRefused(
                f"The request id {request.request_id!r} is in use by an unfinished request.", "request_id"
            )
        refuse_unservable(request, self._config, self._manager)
        self._requests[request.request_id] = request
        self._waiting.append(self._new_sequence(request, BlockTable(), num_computed_tokens=0))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences, in whatever state it is. An unknown one is no error: it has ended."""
        request = self._requests.get(request_id)
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
                self._finish(sequence)
        if whole:
            self._requests.pop(request_id, None)

    @property
    def has_unfinished(self) -> bool:
        """Some sequence still waits or runs."""
        return bool(self._sequences)

    @property
    def stats(self) -> SchedulerStats:
        """Counters and gauges as of now."""
        counters = self._counters
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._preempted),
            num_blocks=self._manager.num_blocks,
            num_used_blocks=self._manager.num_used_blocks,
            num_steps=counters.num_steps,
            num_preemptions=counters.num_preemptions,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_generation_tokens=counters.num_generation_tokens,
            num_recomputed_tokens=counters.num_recomputed_tokens,
        )

    def check_integrity(self) -> None:
        """Prove that blocks, block tables, queues and counters agree.

        Raises:
            AssertionError: saying what does not.
        """
        self._manager.check_integrity(s.block_table for s in self._sequences.values())
        queued = [*self._waiting, *self._preempted, *self._running]
        assert len(queued) == len(set(queued)) == len(self._sequences), "a sequence stands in no queue, or in two"
        for sequence in self._running:
            assert sequence.status is SequenceStatus.RUNNING
            held = len(sequence.block_table)
            assert self._manager.num_blocks_for(sequence.num_computed_tokens) <= held, (
                f"sequence {sequence.seq_id} has {sequence.num_computed_tokens} computed tokens in {held} blocks"
            )
        for sequence in [*self._waiting, *self._preempted]:
            assert not sequence.block_table.block_ids, f"sequence {sequence.seq_id} waits and holds blocks"
            assert sequence.num_computed_tokens == 0
        assert len(self._running) <= self._config.max_num_seqs
        assert self._known_to_runner <= {s.seq_id for s in self._running}

    # --- the step ---

    def schedule(self) -> SchedulerOutput:
        """Choose the tokens of the next step and reserve their blocks.

        Running sequences come first, decodes before prefill chunks; when blocks run out one of them is
        preempted. Whatever budget is left admits preempted sequences, then waiting ones.
        """
        step = _Step(self._config.max_num_batched_tokens)
        # A stable sort: within decodes and within chunks the order of admission stands.
        for sequence in sorted(self._running, key=lambda s: s.num_uncomputed_tokens > 1):
            if step.budget == 0:
                break
            if sequence.status is SequenceStatus.RUNNING:
                self._schedule_running(sequence, step)
        if not step.preempted:
            self._admit(step)
        assert step.num_new_tokens or not self._sequences, "no progress: sequences wait and none was scheduled"
        self._counters.num_steps += 1
        return self._build_output(step)

    def update(self, output: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        """Take in what the step computed: counters, sampled tokens, forks, stop checks."""
        updates = []
        for row, row_result in zip(output.rows, result.rows, strict=True):
            sequence = self._sequences.get(row.seq_id)
            if sequence is None:  # aborted while the step ran
                continue
            sequence.num_computed_tokens += row.num_new_tokens
            update = self._take_result(sequence, row_result)
            if update is not None:
                updates.append(update)
        return updates

    # --- scheduling ---

    def _chunk_size(self, sequence: Sequence, budget: int) -> int:
        cap = self._config.long_prefill_token_threshold or budget
        return min(sequence.num_uncomputed_tokens, budget, cap)

    def _schedule_running(self, sequence: Sequence, step: _Step) -> None:
        num_new = self._chunk_size(sequence, step.budget)
        end = sequence.num_computed_tokens + num_new
        while (allocation := self._manager.allocate(sequence.block_table, sequence.num_computed_tokens, end)) is None:
            victim = choose_victim(self._running, self._config.max_preemptions)
            self._preempt(victim, step)
            if victim is sequence:
                return
        self._add_to_step(sequence, num_new, allocation, step)

    def _admit(self, step: _Step) -> None:
        """Admit while budget, sequence slots and blocks last: preempted sequences first, then by arrival.

        A sequence is admitted only if all its known tokens fit now: two half-computed prompts can then never
        hold what the other needs. One block per running sequence is kept back, so that the next decodes do not
        preempt the newcomer at once.
        """
        while step.budget > 0 and len(self._running) < self._config.max_num_seqs:
            queue = self._preempted or self._waiting
            if not queue:
                return
            sequence = queue[0]
            needed = self._manager.num_blocks_for(sequence.num_tokens)
            if needed + len(self._running) > self._manager.num_free_blocks:
                return
            allocation = self._manager.allocate(sequence.block_table, 0, sequence.num_tokens)
            assert allocation is not None
            del queue[0]
            if sequence.status is SequenceStatus.WAITING and sequence.index == 0:
                self._counters.num_prompt_tokens += sequence.num_prompt_tokens
            sequence.status = SequenceStatus.RUNNING
            self._running.append(sequence)
            if sequence.num_uncomputed_tokens == 0:  # n > 1 and a prompt of one token: nothing to share
                self._fork_siblings(sequence)
                if sequence.status is SequenceStatus.FINISHED:  # aborted; the first of those left takes its place
                    heir = next((s for s in sequence.request.sequences if s in self._running), None)
                    if heir is not None:
                        self._schedule_running(heir, step)
                    continue
            self._add_to_step(sequence, self._chunk_size(sequence, step.budget), allocation, step)

    def _add_to_step(self, sequence: Sequence, num_new: int, allocation: Allocation, step: _Step) -> None:
        assert num_new > 0, f"sequence {sequence.seq_id} is scheduled for no token"
        step.num_new_tokens[sequence] = num_new
        step.allocations[sequence] = allocation
        step.budget -= num_new

    def _preempt(self, sequence: Sequence, step: _Step) -> None:
        """Take a running sequence's blocks, and its row out of this step; its tokens are recomputed later."""
        step.preempted = True
        step.budget += step.num_new_tokens.pop(sequence, 0)
        step.allocations.pop(sequence, None)
        self._counters.num_preemptions += 1
        self._counters.num_recomputed_tokens += sequence.num_computed_tokens
        self._leave_running(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.PREEMPTED
        self._preempted.append(sequence)
        self._preempted.sort(key=resume_order)

    def _build_output(self, step: _Step) -> SchedulerOutput:
        # Decodes first: the attention backends rely on it.
        order = sorted(step.num_new_tokens.items(), key=lambda item: item[1] > 1)
        rows = tuple(self._build_row(sequence, num_new, step.allocations[sequence]) for sequence, num_new in order)
        copies = tuple(
            BlockCopy(a.copy_on_write.src, a.copy_on_write.dst)
            for a in step.allocations.values()
            if a.copy_on_write is not None
        )
        self._known_to_runner.update(row.seq_id for row in rows)
        forgotten, self._forgotten_seq_ids = tuple(self._forgotten_seq_ids), []
        return SchedulerOutput(rows, forgotten, copies)

    def _build_row(self, sequence: Sequence, num_new: int, allocation: Allocation) -> NewRow | KnownRow:
        if sequence.seq_id in self._known_to_runner:
            copied = allocation.copy_on_write
            return KnownRow(
                seq_id=sequence.seq_id,
                new_block_ids=allocation.new_block_ids,
                replaced_block=None if copied is None else (copied.position, copied.dst),
                num_computed_tokens=sequence.num_computed_tokens,
                num_new_tokens=num_new,
            )
        return NewRow(
            seq_id=sequence.seq_id,
            index=sequence.index,
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            params=sequence.request.params,
            block_ids=tuple(sequence.block_table.block_ids),
            num_computed_tokens=sequence.num_computed_tokens,
            num_new_tokens=num_new,
        )

    # --- results ---

    def _take_result(self, sequence: Sequence, result: RowResult) -> SequenceUpdate | None:
        request = sequence.request
        scored = self._new_prompt_logprobs(sequence, result)
        if sequence.num_uncomputed_tokens > 0:
            return self._build_update(sequence, RowResult(prompt_logprobs=scored)) if scored else None
        if request.awaits_fork:
            self._fork_siblings(sequence)
            return self._build_update(sequence, RowResult(prompt_logprobs=scored)) if scored else None
        token_ids, finish_reason, stop_token_id = self._accept_tokens(sequence, result.token_ids)
        accepted = RowResult(token_ids, result.logprobs[: len(token_ids)], scored)
        if finish_reason is not None:
            self._finish(sequence)
        return self._build_update(sequence, accepted, finish_reason, stop_token_id)

    def _new_prompt_logprobs(self, sequence: Sequence, result: RowResult) -> tuple[TokenLogprobs, ...]:
        """Prompt scores not reported yet: a sequence that is recomputed scores its prompt again."""
        request = sequence.request
        if not result.prompt_logprobs or sequence.index != 0:
            return ()
        last = min(sequence.num_computed_tokens, sequence.num_prompt_tokens - 1)  # token 0 has no score
        num_unreported = max(0, last - request.num_scored_tokens)
        request.num_scored_tokens += num_unreported
        return result.prompt_logprobs[len(result.prompt_logprobs) - num_unreported :]

    def _accept_tokens(
        self, sequence: Sequence, token_ids: tuple[int, ...]
    ) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
        """Append sampled tokens up to the first that ends the sequence."""
        params = sequence.request.params
        if params.max_tokens == 0:
            return (), "length", None
        for position, token_id in enumerate(token_ids):
            sequence.token_ids.append(token_id)
            self._counters.num_generation_tokens += 1
            if self._is_stop_token(token_id, params):
                return token_ids[: position + 1], "stop", token_id
            if sequence.num_generated_tokens >= params.max_tokens:
                return token_ids[: position + 1], "length", None
        return token_ids, None, None

    def _is_stop_token(self, token_id: int, params: SamplingParams) -> bool:
        if token_id in params.stop_token_ids:
            return True
        return not params.ignore_eos and token_id in self._config.eos_token_ids

    def _build_update(
        self,
        sequence: Sequence,
        result: RowResult,
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
    ) -> SequenceUpdate:
        return SequenceUpdate(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            prompt_logprobs=result.prompt_logprobs,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
        )

    # --- the life of a sequence ---

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
        self._sequences[sequence.seq_id] = sequence
        request.sequences.append(sequence)
        return sequence

    def _fork_siblings(self, sequence: Sequence) -> None:
        """Make the request's other n - 1 sequences out of the first, whose prompt is computed but for its last token.

        They share its blocks. Those beyond `max_num_seqs` wait their turn at the head of the queue and compute the
        prompt for themselves: a waiting sequence holds no blocks, so that the pool can always be won back.
        """
        request = sequence.request
        num_computed = sequence.num_computed_tokens
        late: list[Sequence] = []
        while request.awaits_fork:
            if len(self._running) < self._config.max_num_seqs:
                sibling = self._new_sequence(
                    request, self._manager.fork(sequence.block_table, num_computed), num_computed
                )
                sibling.status = SequenceStatus.RUNNING
                self._running.append(sibling)
            else:
                late.append(self._new_sequence(request, BlockTable(), num_computed_tokens=0))
        self._waiting.extendleft(reversed(late))
        for forked in request.sequences:
            if forked.index in request.aborted_indices:
                self._finish(forked)

    def _leave_running(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._manager.free(sequence.block_table)
        if sequence.seq_id in self._known_to_runner:
            self._known_to_runner.discard(sequence.seq_id)
            self._forgotten_seq_ids.append(sequence.seq_id)

    def _finish(self, sequence: Sequence) -> None:
        match sequence.status:
            case SequenceStatus.RUNNING:
                self._leave_running(sequence)
            case SequenceStatus.WAITING:
                self._waiting.remove(sequence)
            case SequenceStatus.PREEMPTED:
                self._preempted.remove(sequence)
            case SequenceStatus.FINISHED:
                raise AssertionError(f"sequence {sequence.seq_id} is finished twice")
        sequence.status = SequenceStatus.FINISHED
        del self._sequences[sequence.seq_id]
        if sequence.request.is_finished:
            self._requests.pop(sequence.request.request_id, None)
