"""What tenants that share the engine owe each other in one step: its length, and room for whoever has had the least.

A newcomer waits for the end of the step that runs, and then for its own. Shares of tokens alone do not bound either:
both last as long as the others' prompts and decodes in them. Must not know blocks.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from scheduler.config import SchedulerConfig
from scheduler.queues import SequenceQueues
from scheduler.request import Sequence
from scheduler.shares import OUTPUT_WEIGHT

_REMEMBERED_SECONDS = 30.0  # for which steps stay short: whoever came may come again
_LEAST_PART = 8  # of a short step that prompts have, however many sequences decode
_MAX_HELD_STEPS = 4  # in succession in which decodes are held back


@dataclass(frozen=True, slots=True)
class Turn:
    """A step for one tenant's prompts."""

    tenant: str
    held_back: frozenset[Sequence]  # sequences of others, whose next tokens wait for a later step


class TenantTurns:
    """Bounds the steps of an engine that several tenants use. With one tenant it does nothing."""

    def __init__(self, config: SchedulerConfig, queues: SequenceQueues) -> None:
        """Read from `queues` who is there, and what each has had."""
        self._max_prompt_tokens = config.long_prefill_token_threshold * 3 // 4
        self._queues = queues
        self._last_uneven = float("-inf")  # the last time at which tenants had much and little to do, or took over
        self._last_alone: str | None = None  # the tenant that last had the engine to itself
        self._num_held_steps = 0

    def prompt_budget(self, budget: int, num_decodes: int) -> int:
        """The part of what is left of a step's budget that prompts may take beside so many decodes.

        While one tenant wants much more of the engine than another, or has only just taken it over from one, all
        prompts together are bounded below a long one, and by what the decodes take: the next step begins soon, and with
        it the prompt of whoever has come meanwhile.
        """
        if not self._max_prompt_tokens or self._queues.now - self._last_uneven > _REMEMBERED_SECONDS:
            return budget
        short = self._max_prompt_tokens - int(OUTPUT_WEIGHT * num_decodes)
        return min(budget, max(short, self._max_prompt_tokens // _LEAST_PART, 1))

    def favoured(self, decodes: SequenceOf[Sequence], prompts: SequenceOf[tuple[Sequence, int]]) -> Turn | None:
        """Whether one tenant's prompts have the step for themselves, while decodes of tenants that run more wait.

        That tenant has had the least of those with prompts to compute, in the most urgent class, and runs no more than
        its share; and what waits for it would make the step longer by half of its prompt and more. Other prompts that
        run wait too.

        Args:
            decodes: running sequences with one token to compute.
            prompts: those with more, and how many.
        """
        self._look_around()
        turn = self._turn(decodes, prompts)
        if turn is None or self._num_held_steps == _MAX_HELD_STEPS:
            self._num_held_steps = 0
            return None
        self._num_held_steps += 1
        return turn

    def _look_around(self) -> None:
        """Note whether tenants share the engine unevenly, at once or one after another."""
        shares = self._queues.shares
        alone = shares.only_tenant
        takes_over = alone is not None and self._last_alone is not None and alone != self._last_alone
        if takes_over or shares.are_uneven:
            self._last_uneven = self._queues.now
        if alone is not None:
            self._last_alone = alone

    def _turn(self, decodes: SequenceOf[Sequence], prompts: SequenceOf[tuple[Sequence, int]]) -> Turn | None:
        queues, shares = self._queues, self._queues.shares
        if shares.num_active < 2:
            return None
        service_of = shares.service_of
        waiting = [
            (sequence.priority, service_of(sequence.request.tenant), sequence.request.tenant, num_tokens)
            for sequence, num_tokens in prompts
        ]
        head = queues.next_to_admit()
        if head is not None:
            tenant = head.request.tenant
            waiting.append((queues.class_of(head), service_of(tenant), tenant, head.num_uncomputed_tokens))
        if not waiting:
            return None
        priority, service, tenant, num_prompt_tokens = min(waiting)
        share = len(queues.running) / shares.num_active
        if shares.num_running(tenant) > share:
            return None
        above = {
            name
            for name in {s.request.tenant for s in queues.running}
            if shares.num_running(name) > share and service_of(name) > service
        }
        held_back = frozenset(s for s in decodes if s.priority >= priority and s.request.tenant in above)
        num_others = sum(num_tokens for s, num_tokens in prompts if s.request.tenant != tenant)
        is_worth_it = num_others + OUTPUT_WEIGHT * len(held_back) > num_prompt_tokens / 2
        return Turn(tenant, held_back) if is_worth_it else None
