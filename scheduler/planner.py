"""Chooses the tokens of a step: who goes on, who is admitted, and who gives way for them.

Decodes go first, then prompts in chunks (Sarathi-Serve, OSDI 2024) and admissions by turns. Reserves blocks as it
goes. Must not know results, nor how a step is told to the runner.
"""

from collections import Counter
from dataclasses import replace
from typing import Literal

from paged_cache.manager import BlockManager
from paged_cache.prefix_cache import CachedPrefix
from scheduler.config import SchedulerConfig
from scheduler.ledger import RequestLedger
from scheduler.policy import Victims, is_swap_cheaper, least_that_make_room, preemption_order
from scheduler.queues import SequenceQueues
from scheduler.request import Sequence, SequenceStatus
from scheduler.request_report import PreemptionCause, WaitReason
from scheduler.stats import SchedulerCounters
from scheduler.step_plan import StepPlan
from scheduler.tenant_turns import TenantTurns, Turn

_NOTHING_CACHED = CachedPrefix((), 0, 0, None)
_NUM_SPARE = 1  # free blocks that are kept back for each running sequence when another is admitted
_MAX_IDLE_PROMPTS = 4  # that hold blocks and wait for a part of the budget


class Planner:
    """Plans one step after another over the same queues and blocks."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: BlockManager,
        queues: SequenceQueues,
        ledger: RequestLedger,
        counters: SchedulerCounters,
    ) -> None:
        """Plan within the limits of `config`; move sequences by `queues` alone."""
        self._config = config
        self._manager = manager
        self._queues = queues
        self._ledger = ledger
        self._counters = counters
        self._turns = TenantTurns(config, queues)
        self._victims: Victims | None = None  # of this step, as long as nobody is admitted
        self._favoured: str | None = None  # the only tenant to be admitted of, at this point of a step

    def plan(self, *, must_progress: bool) -> StepPlan:
        """Choose the tokens of the next step and reserve their blocks.

        Args:
            must_progress: no step is in flight, so that if anything can run, something must be planned.
        """
        plan = StepPlan(self._config.max_num_batched_tokens)
        self._victims = None
        decodes, prompts = self._uncomputed()
        turn = self._turns.favoured(decodes, prompts)
        if turn is None:
            self._plan_all(decodes, prompts, plan)
        elif not self._plan_turn(turn, decodes, prompts, plan):
            self._plan_all([s for s in decodes if s in turn.held_back], prompts, plan)
        if must_progress:
            self._make_way_for_anyone(plan)
        self._counters.num_swapped_in_blocks += len(plan.swapped_in)
        return plan

    # --- sequences that run ---

    def _uncomputed(self) -> tuple[list[Sequence], list[tuple[Sequence, int]]]:
        """Running sequences with one token to compute, and those with more, in the order of admission."""
        decodes, prompts = [], []
        for sequence in self._queues.running:
            num_uncomputed = sequence.num_uncomputed_tokens
            if num_uncomputed > 1:
                prompts.append((sequence, num_uncomputed))
            elif num_uncomputed == 1:
                decodes.append(sequence)
        return decodes, prompts

    def _plan_all(self, decodes: list[Sequence], prompts: list[tuple[Sequence, int]], plan: StepPlan) -> None:
        """Let everybody go on, then admit."""
        self._plan_decodes(decodes, plan)
        plan.budget = self._turns.prompt_budget(plan.budget, len(decodes))
        self._plan_prompts(prompts, plan)

    def _plan_turn(
        self, turn: Turn, decodes: list[Sequence], prompts: list[tuple[Sequence, int]], plan: StepPlan
    ) -> bool:
        """Let those go on that are not held back, and one tenant's prompts, which may take all of the budget.

        Returns:
            Whether any of these prompts could.
        """
        going_on = [s for s in decodes if s not in turn.held_back]
        self._plan_decodes(going_on, plan)
        self._favoured = turn.tenant
        self._plan_prompts([prompt for prompt in prompts if prompt[0].request.tenant == turn.tenant], plan)
        self._favoured = None
        decoding = frozenset(going_on)
        prompting = (s for s in self._queues.running if s.request.tenant == turn.tenant and s not in decoding)
        return any(plan.num_tokens_of(s) for s in prompting)

    def _plan_decodes(self, decodes: list[Sequence], plan: StepPlan) -> None:
        """Let sequences compute one token each. Preemption takes some out of the list meanwhile."""
        for sequence in decodes:
            if plan.budget > 0 and sequence.status is SequenceStatus.RUNNING:
                self._plan_tokens(sequence, 1, 1, plan)

    def _plan_prompts(self, chunks: list[tuple[Sequence, int]], plan: StepPlan) -> None:
        """Share what is left of the budget among prompts in chunks and those that are admitted now, in turns.

        A prompt that would take more than half of it counts as long: all long ones together get half, each of them no
        more than the cap for long ones, and the rest goes to the short ones among the others. What these leave goes to
        the long ones after all.
        """
        long_budget = plan.budget // 2
        long_prompts: list[Sequence] = []  # whose parts have been cut short
        num_for_long = long_budget
        cap = self._config.long_prefill_token_threshold or plan.budget

        def share(sequence: Sequence, num_uncomputed: int) -> None:
            nonlocal num_for_long
            if sequence.status is not SequenceStatus.RUNNING:  # it ended as it was forked, or gave way
                return
            num_new = min(num_uncomputed, plan.budget)
            if num_uncomputed > min(cap, long_budget):
                long_prompts.append(sequence)
                num_new = min(num_new, cap, num_for_long)
                num_for_long -= num_new
            if num_new:
                self._plan_tokens(sequence, num_new, num_uncomputed, plan)

        for sequence, num_uncomputed in self._in_turn(chunks):
            while self._is_ahead(sequence):
                admitted = self._admit_next(plan, self._num_idle(long_prompts, plan))
                if admitted is None:
                    break
                share(admitted, admitted.num_uncomputed_tokens)
            share(sequence, num_uncomputed)
        while (admitted := self._admit_next(plan, self._num_idle(long_prompts, plan))) is not None:
            share(admitted, admitted.num_uncomputed_tokens)
        for sequence in long_prompts:
            if sequence.status is SequenceStatus.RUNNING:
                self._lengthen(sequence, plan)

    def _num_idle(self, prompts: list[Sequence], plan: StepPlan) -> int:
        return sum(plan.num_tokens_of(sequence) == 0 for sequence in prompts)

    def _in_turn(self, chunks: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Prompts in chunks by class, then by what their tenants have had; among equals the order of admission."""
        if len(chunks) > 1:
            chunks.sort(key=lambda chunk: self._turn_of(chunk[0]))
        return chunks

    def _is_ahead(self, sequence: Sequence) -> bool:
        """Whoever is to be admitted next goes before this running prompt: of a better class, or with less service."""
        head = self._queues.next_to_admit()
        return head is not None and self._turn_of(head) < self._turn_of(sequence)

    def _turn_of(self, sequence: Sequence) -> tuple[int, float]:
        return self._queues.class_of(sequence), self._queues.shares.service_of(sequence.request.tenant)

    def _lengthen(self, sequence: Sequence, plan: StepPlan) -> None:
        """Give a long prompt what is left of the budget."""
        num_planned = plan.num_tokens_of(sequence)
        num_uncomputed = sequence.num_uncomputed_tokens
        num_wanted = min(num_uncomputed, plan.budget + num_planned)
        if num_planned == 0 and num_wanted:
            self._plan_tokens(sequence, num_wanted, num_uncomputed, plan)
        elif num_wanted > num_planned:
            plan.extend(sequence, num_wanted - num_planned)

    def _plan_tokens(self, sequence: Sequence, num_new_tokens: int, num_uncomputed: int, plan: StepPlan) -> None:
        """Let a running sequence compute tokens; whoever holds blocks that it lacks gives way, or else it does.

        Blocks for all that is uncomputed are there since its admission: a chunk can grow without asking again.
        """
        table, num_computed = sequence.block_table, sequence.num_computed_tokens
        end = num_computed + num_uncomputed
        while (allocation := self._manager.allocate(table, num_computed, end)) is None:
            if self._victims is None:
                self._victims = Victims(self._queues.running, self._manager, self._config.max_preemptions)
            victim = self._victims.take()
            self._preempt(victim, plan, by=sequence, cause="kv_blocks")
            if victim is sequence:
                return
        plan.add(sequence, num_new_tokens, allocation)

    # --- admission ---

    def _admit_next(self, plan: StepPlan, num_idle: int) -> Sequence | None:
        """Admit whose turn it is, if there is room, or if others must make some. None: nobody was admitted.

        `num_idle` running prompts have no part in this step; a few may stand there, so that short ones can pass them.

        A sequence is admitted only if all its known tokens fit now: two half-computed prompts can then never hold
        what the other needs. One block per running sequence is kept back, so that the next decodes do not preempt
        the newcomer at once. In a step in which somebody gave way nobody else is admitted.
        """
        sequence = self._queues.next_to_admit()
        if sequence is None:
            return None
        if self._favoured is not None and sequence.request.tenant != self._favoured:
            return self._hold_up(sequence, "behind_others")
        if plan.budget <= 0 or num_idle > _MAX_IDLE_PROMPTS:
            return self._hold_up(sequence, "token_budget")
        if plan.preempted:
            return self._hold_up(sequence, self._shortage)
        self._victims = None
        cached = self._find_prefix(sequence)
        num_short = self._num_blocks_short(sequence, cached)
        if num_short > 0 or not self._queues.has_room:
            if not self._make_room(sequence, num_short, cached, plan):
                return self._hold_up(sequence, self._shortage)
            cached = self._find_prefix(sequence)  # who gave way may have held what was found
        return self._admit(sequence, cached, plan)

    @property
    def _shortage(self) -> Literal["max_num_seqs", "kv_blocks"]:
        """What there is too little of, where not everybody can run."""
        return "kv_blocks" if self._queues.has_room else "max_num_seqs"

    def _hold_up(self, sequence: Sequence, reason: WaitReason) -> Sequence | None:
        """Tell the ledger why a sequence is not admitted, which it is not."""
        self._ledger.waits(sequence.request, reason, self._queues.now)
        return None

    def _admit(self, sequence: Sequence, cached: CachedPrefix, plan: StepPlan) -> Sequence:
        """Let a sequence run for which there is room. Returns it, or whoever of its request runs in its place."""
        self._manager.share_prefix(sequence.block_table, cached)
        allocation = self._manager.allocate(sequence.block_table, cached.num_tokens, sequence.num_tokens)
        assert allocation is not None
        if sequence.status is SequenceStatus.WAITING:
            self._count_prompt(sequence, cached)
        moves = self._queues.start(sequence, cached)
        plan.swapped_in += moves
        if sequence.num_uncomputed_tokens == 0 and sequence.request.awaits_fork:  # all that is shared is there
            self._queues.fork_siblings(sequence)
            if sequence.status is SequenceStatus.FINISHED:  # aborted; the first of those left takes its place
                return next((s for s in sequence.request.sequences if s in self._queues.running), sequence)
        return sequence

    def _find_prefix(self, sequence: Sequence) -> CachedPrefix:
        """The cached blocks that it may begin with. The last token is always computed: the next is sampled from it."""
        if not self._may_begin_cached(sequence):
            return _NOTHING_CACHED
        sequence.prefix.extend(sequence.token_ids)
        return self._manager.find_prefix(sequence.prefix, sequence.num_tokens - 1)

    def _may_begin_cached(self, sequence: Sequence) -> bool:
        request = sequence.request
        return request.reuses_cache and request.may_skip_prompt and self._manager.enable_prefix_caching

    def _num_blocks_short(self, sequence: Sequence, cached: CachedPrefix) -> int:
        """Blocks that are missing for its admission, 0 or less if there are enough."""
        num_new = self._manager.num_blocks_for(sequence.num_tokens) - len(cached.block_ids)
        num_needed = num_new + cached.num_unused + _NUM_SPARE * len(self._queues.running)
        return num_needed - self._manager.num_free_blocks

    def _count_prompt(self, sequence: Sequence, cached: CachedPrefix) -> None:
        """Once a request: its first sequence is admitted for the first time."""
        counters = self._counters
        counters.num_prompt_tokens += sequence.num_prompt_tokens
        sequence.num_cached_tokens = cached.num_tokens
        if self._may_begin_cached(sequence):
            counters.num_prefix_queries += sequence.num_prompt_tokens
            counters.num_prefix_hits += cached.num_tokens

    # --- giving way ---

    def _make_room(self, sequence: Sequence, num_blocks_short: int, cached: CachedPrefix, plan: StepPlan) -> bool:
        """Preempt for whoever is to be admitted, if others must give way to it: for priority's sake, or fairness's.

        Or beams that wait for it, which have nothing to do with what they hold.
        """
        causes: tuple[tuple[PreemptionCause, list[Sequence]], ...] = (
            ("kv_blocks" if num_blocks_short > 0 else "max_num_seqs", sequence.idle_mates),
            ("priority", self._lower_classes(sequence)),
            ("fair_share", self._above_share(sequence, num_blocks_short)),
        )
        for cause, candidates in causes:
            chosen = least_that_make_room(
                sorted(candidates, key=lambda s: preemption_order(s, self._manager)),
                num_blocks_short,
                self._manager,
                needs_slot=not self._queues.has_room,
                needed_blocks=set(cached.block_ids),
                num_spare=_NUM_SPARE,
            )
            for victim in chosen:
                self._preempt(victim, plan, by=sequence, cause=cause)
            if chosen:
                return self._num_blocks_short(sequence, self._find_prefix(sequence)) <= 0
        return False

    def _lower_classes(self, sequence: Sequence) -> list[Sequence]:
        """Running sequences that must give way to a better priority, but for what ageing has lifted it by.

        Who was lifted itself before it ran counts as of the class that it was lifted to: nobody takes turns. Nobody is
        spared who waits for beams that do not run: they stand behind this one.
        """
        priority = sequence.request.priority
        most = self._config.max_preemptions
        lower = [s for s in self._queues.running if s.priority > priority]
        return [s for s in lower if s.num_preemptions < most or s.idle_mates]

    def _above_share(self, sequence: Sequence, num_blocks_short: int) -> list[Sequence]:
        """Running sequences of tenants that hold more than their share, where this one's tenant holds less.

        Each preemption brings the tenants closer to equal shares, and none below, so that nobody takes turns: one that
        holds less than twice its share of the blocks keeps a sequence without which it would hold less than its share.
        """
        queues, tenant = self._queues, sequence.request.tenant
        num_active = queues.shares.num_active
        if num_active < 2 or not queues.is_below_share(tenant):
            return []
        num_blocks = Counter[str]()
        for running in queues.running:
            num_blocks[running.request.tenant] += len(running.block_table)
        if num_blocks_short > 0:
            most = self._manager.num_blocks / num_active
            if num_blocks[tenant] + self._manager.num_blocks_for(sequence.num_tokens) > most:
                return []
            least = {name: most if num_held < 2 * most else 0.0 for name, num_held in num_blocks.items()}
        else:
            least = {name: 0.0 if queues.is_above_share(name) else float("inf") for name in num_blocks}
        return [
            s
            for s in queues.running
            if num_blocks[s.request.tenant] - len(s.block_table) >= least[s.request.tenant]
            and s.request.tenant != tenant
            and s.priority >= queues.class_of(sequence)
            and s.num_preemptions < self._config.max_preemptions
        ]

    def _make_way_for_anyone(self, plan: StepPlan) -> None:
        """Beams that wait for one another hold blocks and have nothing to compute: one that can go on may need them."""
        while plan.is_empty and self._queues.running and self._queues.preempted:
            victim = Victims(self._queues.running, self._manager, self._config.max_preemptions).take()
            self._preempt(victim, plan, by=self._queues.next_to_admit() or victim, cause=self._shortage)
            plan.preempted = False
            self._plan_prompts([], plan)

    def _preempt(self, sequence: Sequence, plan: StepPlan, *, by: Sequence, cause: PreemptionCause) -> None:
        """Take a running sequence's blocks, and its row out of this step; its tokens are copied back or computed again.

        A token of it that a launched step samples is not lost: `update` appends it, and what comes after reads it.
        """
        # The step writes to the host first: it must not write what it reads from there afterwards. That goes for what
        # it was to bring back for this sequence too, which its blocks do not hold yet.
        # Siblings that are forked as it comes back would copy from a block that the same step swaps in.
        request = sequence.request
        may_swap = not (plan.swapped_in or request.awaits_fork or request.params.pooling == "mean")
        dropped_copy = plan.drop(sequence)
        is_swapped = False
        if may_swap and is_swap_cheaper(sequence, self._manager, self._config):
            moves = self._manager.swap_out(sequence.block_table, sequence.num_computed_tokens)
            if moves is not None:
                is_swapped = True
                if dropped_copy is not None:  # what its new block was to hold is still in the old one
                    moves = tuple(replace(m, src=dropped_copy.src) if m.src == dropped_copy.dst else m for m in moves)
                sequence.num_swapped_tokens = sequence.num_computed_tokens
                plan.swapped_out += moves
                self._counters.num_swapped_out_blocks += len(moves)
        self._counters.num_preemptions += 1
        self._ledger.preempted(sequence, self._queues.now, by, cause, is_swapped)
        self._queues.preempt(sequence)
