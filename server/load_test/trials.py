"""One load after another against one server, each with prompts and arrivals of its own; given up when it is lost.

Knows how a load is run and judged; what is asked, how it is shown and where results go are others' affair.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from server.load_test.client import Client
from server.load_test.load import Load
from server.load_test.objective import Objective
from server.load_test.plan import Plan
from server.load_test.prompt_maker import PromptMaker
from server.load_test.record import Record
from server.load_test.request_form import RequestForm
from server.load_test.search import Trial
from server.load_test.summary import Summary, summarise
from server.load_test.workload import Workload

_LOOK_SECONDS = 0.2
_REST_SECONDS = 1.0  # between two trials, for a server to free what was given up

# Shows a load while it runs; is told its title and its plan first, gets its records, and is then entered with it.
Follow = Callable[[str, Plan], "tuple[Callable[[Record], None], Callable[[Load], AbstractAsyncContextManager[None]]]"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A load that is over."""

    plan: Plan
    records: tuple[Record, ...]
    summary: Summary
    seed: str
    rate: float | None  # of a trial


class Trials:
    """Runs loads of one workload."""

    def __init__(
        self,
        client: Client,
        form: RequestForm,
        workload: Workload,
        maker: PromptMaker,
        objective: Objective,
        goal: float,
        follow: Follow,
    ) -> None:
        """`goal` is the share of requests that must keep the objective for a trial to be kept."""
        self.outcomes: list[Outcome] = []
        self._client = client
        self._form = form
        self._workload = workload
        self._maker = maker
        self._objective = objective
        self._goal = goal
        self._follow = follow

    async def run(self) -> Outcome:
        """The load as it was asked for.

        Raises:
            BadPlan: nothing is due.
        """
        return await self._run("Load", None, may_give_up=False)

    async def attempt(self, rate: float) -> Trial:
        """The load at another rate, judged.

        Raises:
            BadPlan: nothing is due.
        """
        if self.outcomes:
            await asyncio.sleep(_REST_SECONDS)
        outcome = await self._run(f"Trial {len(self.outcomes) + 1}: {rate:.4g} sessions/s", rate, may_give_up=True)
        num_planned = outcome.plan.num_requests or len(outcome.records)
        is_given_up = any(record.error_kind == "stopped" for record in outcome.records) or (
            len(outcome.records) < num_planned
        )
        if is_given_up:
            num_missed = sum(not self._objective.is_kept(record) for record in outcome.records)
            share = 1 - num_missed / num_planned
            return Trial(rate, is_kept=False, share=min(share, self._goal), is_given_up=True)
        share = outcome.summary.kept_share or 0.0
        return Trial(rate, is_kept=share >= self._goal, share=share)

    async def _run(self, title: str, rate: float | None, *, may_give_up: bool) -> Outcome:
        maker = self._maker.seeded(f"{self._maker.seed}.{len(self.outcomes)}")
        plan = self._workload.plan(maker, rate)
        take, shown = self._follow(title, plan)
        load = Load(
            self._client,
            self._form,
            plan,
            num_users=self._workload.num_users,
            max_concurrency=self._workload.max_concurrency,
            duration=self._workload.amount.duration,
            start_at=self._workload.start_at,
            on_record=take,
        )
        num_sent_again = self._client.num_sent_again
        watching = asyncio.create_task(self._give_up_when_lost(load, plan)) if may_give_up else None
        async with shown(load):
            try:
                records = await load.run()
            finally:
                if watching is not None:
                    watching.cancel()
        summary = summarise(
            records,
            self._objective,
            client_seconds=load.client_seconds,
            num_sent_again=self._client.num_sent_again - num_sent_again,
        )
        self.outcomes.append(Outcome(plan, tuple(records), summary, maker.seed, rate))
        return self.outcomes[-1]

    async def _give_up_when_lost(self, load: Load, plan: Plan) -> None:
        """Stop a load once so many requests have missed the objective that the rest cannot make up for it."""
        assert plan.num_requests is not None, "a trial knows what it sends"
        most = (1 - self._goal) * plan.num_requests
        num_missed = num_looked_at = 0
        while num_missed + self._num_overdue(load) <= most:
            await asyncio.sleep(_LOOK_SECONDS)
            ended = load.records[num_looked_at:]
            num_looked_at += len(ended)
            num_missed += sum(not self._objective.is_kept(record) for record in ended)
        load.stop()

    def _num_overdue(self, load: Load) -> int:
        """Open requests that have missed the objective already, whatever still comes."""
        now = load.now if load.start else 0.0
        ttft, end_to_end = self._objective.ttft, self._objective.end_to_end
        return sum(
            (ttft is not None and not answer.piece_times and now - record.due > ttft)
            or (end_to_end is not None and now - record.due > end_to_end)
            for record, answer in load.open.items()
        )
