"""One load after another against one server, each with prompts and arrivals of its own; given up when it is lost.

Knows how a load is run and judged; what is asked, how it is shown and where results go are others' affair.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from server.load_test.client import Client
from server.load_test.exchange_errors import ExchangeFailed
from server.load_test.load import Load
from server.load_test.objective import Objective
from server.load_test.plan import Plan
from server.load_test.preparation import ask
from server.load_test.prompt_maker import PromptMaker
from server.load_test.record import Record
from server.load_test.request_form import RequestForm
from server.load_test.search import Trial
from server.load_test.summary import Summary, summarise
from server.load_test.workload import Workload

_LOOK_SECONDS = 0.2
_REST_SECONDS = 1.0  # after a trial that was given up, before the server is asked whether it has worked that off
_PROBE_TOKENS = 16
_MOST_PROBES = 5

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
        self.failure: ExchangeFailed | None = None  # why there are no more trials, if the server is why
        self._client = client
        self._form = form
        self._workload = workload
        self._maker = maker
        self._objective = objective
        self._goal = goal
        self._follow = follow
        self._running: Load | None = None
        self._resting: asyncio.Future[None] | None = None
        self._is_lost = False  # the last trial was given up
        self._is_stopped = False

    def stop(self) -> None:
        """Give up what runs, and begin nothing more."""
        self._is_stopped = True
        if self._running is not None:
            self._running.stop()
        if self._resting is not None:
            self._resting.cancel()

    async def run(self) -> Outcome:
        """The load as it was asked for.

        Raises:
            BadPlan: nothing is due.
        """
        outcome, _ = await self._run("Load", None, may_give_up=False)
        self.outcomes.append(outcome)
        return outcome

    async def attempt(self, rate: float) -> Trial | None:
        """The load at another rate, judged; None where there are no more trials.

        Raises:
            BadPlan: nothing is due.
        """
        if self._is_lost:
            self._resting = asyncio.ensure_future(self._rest())
            await asyncio.wait((self._resting,))
        if self._is_stopped or self.failure is not None:
            return None
        title = f"Trial {len(self.outcomes) + 1}: {rate:.4g} sessions/s"
        outcome, num_lost = await self._run(title, rate, may_give_up=True)
        if self._is_stopped:
            return None
        self.outcomes.append(outcome)
        self._is_lost = num_lost is not None
        if num_lost is not None:
            share = 1 - num_lost / max(1, outcome.plan.num_requests or 0)
            return Trial(rate, is_kept=False, share=share, is_given_up=True)
        share = outcome.summary.kept_share or 0.0
        return Trial(rate, is_kept=share >= self._goal, share=share)

    async def _rest(self) -> None:
        """Wait until the server has worked off what was given up: until it answers what came after it."""
        prompt = self._maker.whole(_PROBE_TOKENS, f"probe {len(self.outcomes)}")
        for _ in range(_MOST_PROBES):
            await asyncio.sleep(_REST_SECONDS)
            try:
                await ask(self._client, self._form, prompt, max_tokens=2)
            except ExchangeFailed as failure:
                self.failure = failure
            else:
                self.failure = None
                return

    async def _run(self, title: str, rate: float | None, *, may_give_up: bool) -> tuple[Outcome, int | None]:
        """A load; and of one that was given up, the requests that had missed the objective by then."""
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
        self._running = load
        async with shown(load):
            try:
                records = await load.run()
            finally:
                self._running = None
                if watching is not None:
                    watching.cancel()
        summary = summarise(
            records,
            self._objective,
            client_seconds=load.client_seconds,
            num_sent_again=self._client.num_sent_again - num_sent_again,
        )
        num_lost = watching.result() if watching is not None and watching.done() else None
        return Outcome(plan, tuple(records), summary, maker.seed, rate), num_lost

    async def _give_up_when_lost(self, load: Load, plan: Plan) -> int:
        """Stop a load once so many requests have missed the objective that the rest cannot make up for it; how many."""
        assert plan.num_requests is not None, "a trial knows what it sends"
        most = (1 - self._goal) * plan.num_requests
        num_missed = num_looked_at = 0
        while num_missed + (num_overdue := self._num_overdue(load)) <= most:
            await asyncio.sleep(_LOOK_SECONDS)
            ended = load.records[num_looked_at:]
            num_looked_at += len(ended)
            num_missed += sum(not self._objective.is_kept(record) for record in ended)
        load.stop()
        return num_missed + num_overdue

    def _num_overdue(self, load: Load) -> int:
        """Open requests that have missed the objective already, whatever still comes."""
        now = load.now if load.start else 0.0
        ttft, end_to_end = self._objective.ttft, self._objective.end_to_end
        return sum(
            (ttft is not None and not answer.piece_times and now - record.due > ttft)
            or (end_to_end is not None and now - record.due > end_to_end)
            for record, answer in load.open.items()
        )
