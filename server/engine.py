"""The engine: the only place that sees both the scheduler and the model runner. Built once, stepped in a loop.

Knows no sockets and no HTTP; the process around it is server/engine_process.py.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec.structs import astuple

from models.memory import available_host_bytes
from models.runner import ModelRunner
from models.step_outputs import PendingStep
from paged_cache.manager import BlockManager
from scheduler.admission import RequestRefused
from scheduler.grammar import Vocabulary
from scheduler.output import SchedulerOutput, SequenceUpdate
from scheduler.pool_report import PoolReport
from scheduler.request import Request
from scheduler.request_report import RequestReport
from scheduler.scheduler import Scheduler
from server.engine_builder import build_device_half
from server.engine_config import EngineConfig
from server.engine_load import EngineLoad, log_starving
from server.grammar_compilation import GrammarCompilation
from server.messages import EngineInfo, EngineStats, Rejected, Submit
from server.step_clock import StepClock
from server.submission_check import refuse_unknown_token_ids
from server.tokenizer import load_tokenizer

logger = logging.getLogger("octavo.engine")


class Engine:
    """Requests in, sequence updates out, one step at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        info: EngineInfo,
        *,
        grammars: GrammarCompilation | None = None,
        async_scheduling: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Wire a scheduler to the runner whose cache its blocks name; see `build_engine`.

        Args:
            scheduler: over the blocks of the runner's cache.
            runner: executes its steps.
            info: for the edge.
            grammars: compiles those that requests ask for; None = such requests are refused.
            async_scheduling: while a step runs on the device, the next one is scheduled and launched behind it.
            clock: seconds since the epoch, as the edge counts them too.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._grammars = grammars
        self._clock = clock
        self._load = EngineLoad()
        self._step_clock = StepClock()
        self._rejected: list[Rejected] = []  # by the scheduler, not taken yet
        self._num_steps_ahead = 1 if async_scheduling else 0
        self._in_flight: deque[tuple[SchedulerOutput, PendingStep]] = deque()  # launched, not updated
        self._num_integrity_failures = 0
        self.info = info

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do, if only to take the result of one that nobody waits for."""
        return self._scheduler.has_runnable or bool(self._in_flight)

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges as of now."""
        stats, steps = self._scheduler.stats, self._step_clock
        return EngineStats(
            *astuple(stats),
            num_integrity_failures=self._num_integrity_failures,
            queue_seconds=self._load.seconds_until_served(stats),
            step_seconds=dict(steps.seconds),
            step_token_counts=tuple(steps.token_counts),
            num_step_tokens=steps.num_tokens,
        )

    def submit(self, message: Submit) -> None:
        """Queue a request, or let `take_rejected` find it where there is no room, or another that gave way to it.

        One for structured output runs when `take_rejected` has found its grammar compiled.

        Raises:
            RequestRefused: also for a token id that the model does not have, which would end the engine later.
        """
        wanted = message.params.structured_output
        if wanted is not None and self._grammars is None:
            raise RequestRefused(f"{wanted.param} is not supported by this engine.", wanted.param)
        refuse_unknown_token_ids(message, self.info.vocab_size)
        self._scheduler.add(_as_request(message), self._clock())
        dropped = self._collect_dropped()
        if wanted is not None and self._grammars is not None and message.request_id not in dropped:
            self._grammars.request(message.request_id, wanted)

    def take_rejected(self) -> list[Rejected]:
        """Those that were ended since the last call for want of room, time or a grammar; nothing more comes of them.

        Lets the requests run whose grammars are compiled by now, and keeps the time of those that wait while no step
        does.
        """
        now = self._clock()
        if self._scheduler.has_unfinished:
            self._scheduler.drop_late(now)
            log_starving(self._scheduler.ledger.starving(now))
        self._collect_dropped()
        self._take_grammars(now)
        if not self.has_unfinished:  # after an abort or a drop too, which no step follows
            self._load.rests()
            self._step_clock.rests()
        rejected, self._rejected = self._rejected, []
        return rejected

    def take_reports(self) -> list[RequestReport]:
        """What happened to the requests that have ended since the last call."""
        reports = self._scheduler.ledger.take_ended()
        self._load.take(reports)
        return reports

    def inspect(self, request_ids: Iterable[str]) -> list[RequestReport]:
        """What has happened so far to those of these requests that are here."""
        now = self._clock()
        reports = (self._scheduler.ledger.report(request_id, now) for request_id in request_ids)
        return [report for report in reports if report is not None]

    def inspect_pool(self) -> PoolReport:
        """Every KV block and who holds it."""
        return self._scheduler.report_pool()

    def abort(self, request_id: str, index: int | None) -> None:
        """End a request or one of its sequences, in whatever state."""
        if self._grammars is not None and index is None:
            self._grammars.give_up(request_id)
        self._scheduler.abort(request_id, index, self._clock())

    def close(self) -> None:
        """End what runs beside the engine. Nothing is asked of it any more."""
        if self._grammars is not None:
            self._grammars.close()

    def step(self) -> list[SequenceUpdate]:
        """Schedule, launch, update.

        With async scheduling the update is that of the step before, which runs meanwhile: the first of the steps
        brings nothing yet, and when nothing is left to schedule the last result is taken by a step of its own.
        """
        steps = self._step_clock
        steps.begins_step()
        if self._scheduler.has_runnable:
            now = self._clock()
            self._load.begins_step(now)
            output = self._scheduler.schedule(now)
            steps.ends("schedule")
            self._in_flight.append((output, self._runner.launch(output)))
            steps.counts(output.num_tokens)
            if len(self._in_flight) <= self._num_steps_ahead:
                steps.ends("execute")
                return []
        output, pending = self._in_flight.popleft()
        result = pending.result()
        steps.ends("execute")
        now = self._clock()
        updates = self._scheduler.update(output, result, now)
        self._load.ends_step(output.num_tokens, now, is_last=not self.has_unfinished)
        steps.ends("update")
        return updates

    def check_integrity(self) -> None:
        """Prove that the block pool is whole; if it is not, count and report it and go on serving.

        For an idle engine: while steps are in flight, blocks that are free already may still be written to.
        """
        assert not self._in_flight
        try:
            self._scheduler.check_integrity()
        except AssertionError as error:
            self._num_integrity_failures += 1
            logger.error(
                "The block pool is not whole: %s. Blocks may be lost until a restart; please report it.", error
            )

    def _take_grammars(self, now: float) -> None:
        if self._grammars is None:
            return
        for compiled in self._grammars.take_finished():
            if compiled.state is not None:
                self._scheduler.provide_grammar(compiled.request_id, compiled.state, now)
                continue
            self._scheduler.abort(compiled.request_id, None, now)
            rejected = Rejected(compiled.request_id, compiled.message, compiled.param, compiled.is_shortage)
            self._rejected.append(rejected)

    def _collect_dropped(self) -> set[str]:
        """Take over what the scheduler has dropped, and return the ids."""
        dropped = self._scheduler.take_dropped()
        if not dropped:
            return set()
        retry_after = self._load.seconds_until_served(self._scheduler.stats)
        for each in dropped:
            if self._grammars is not None:
                self._grammars.give_up(each.request_id)
            self._rejected.append(
                Rejected(each.request_id, each.message, is_shortage=True, cause=each.cause, retry_after=retry_after)
            )
        return {each.request_id for each in dropped}


def _as_request(message: Submit) -> Request:
    return Request(
        message.request_id,
        tuple(message.prompt_token_ids),
        message.params,
        message.arrival_time,
        priority=message.priority,
        tenant=message.tenant,
        cache_salt=message.cache_salt,
        reuses_cache=message.reuses_cache,
        queue_deadline=message.queue_deadline,
        deadline=message.deadline,
    )


def build_engine(
    config: EngineConfig,
    on_progress: Callable[[str, int, int], None],
    on_grammar: Callable[[], None] = lambda: None,
) -> Engine:
    """Build the device half and put the scheduler before it.

    Args:
        config: from the edge's settings.
        on_progress: called with the stage, and how much of it is done of how much in all.
        on_grammar: called from a thread when `Engine.take_rejected` has a grammar to take in.

    Raises:
        UnservableSettings, ModelError, BackendUnavailableError, NotEnoughMemory: for a person to read.
    """
    half = build_device_half(config, on_progress)
    manager = BlockManager(
        half.info.num_blocks,
        half.info.block_size,
        num_host_blocks=half.num_host_blocks,
        enable_prefix_caching=half.info.enable_prefix_caching,
    )
    scheduler = Scheduler(half.scheduling, manager)
    grammars = GrammarCompilation(lambda: _load_vocabulary(config.model_path), half.info.vocab_size, on_grammar)
    engine = Engine(
        scheduler,
        half.runner,
        half.info,
        grammars=grammars,
        async_scheduling=bool(half.config.async_scheduling),
    )
    if half.info.kv_cache_bytes < available_host_bytes():  # else memory is taken as blocks come to be used
        half.kv_cache.populate(lambda: engine.has_unfinished)
    return engine


def _load_vocabulary(model_path: str) -> Vocabulary:
    """The tokens that grammars are followed with. Raises TokenizerError."""
    tokenizer = load_tokenizer(Path(model_path))
    return Vocabulary(
        [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)],
        tokenizer.special_token_ids,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
