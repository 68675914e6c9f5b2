"""One engine in simulated time: the real scheduler and block manager; a cost model stands in for the device.

Steps like the engine's loop (server/engine.py): with `num_steps_ahead` 1 the next step is scheduled while one runs.
Knows no trace and no other replica.
"""

from collections import deque
from dataclasses import dataclass, field

from paged_cache.manager import BlockManager
from scheduler.output import NewRow, RowResult, SchedulerOutput, StepResult
from scheduler.request import Request
from scheduler.request_report import RequestReport
from scheduler.scheduler import Scheduler
from scheduler.simulate.deployment import Deployment
from scheduler.simulate.measurements import Measurements
from scheduler.simulate.prompts import GENERATED
from scheduler.simulate.step_cost import StepWork
from scheduler.stats import SchedulerStats

_SAMPLED = RowResult((GENERATED,))
_NOT_SAMPLED = RowResult()


@dataclass(slots=True)
class _Sequences:
    """What the device knows of the sequences that hold blocks."""

    num_known: dict[int, int] = field(default_factory=dict)  # tokens by seq_id, those that steps in flight sample too
    num_computed: dict[int, int] = field(default_factory=dict)  # by seq_id
    total_computed: int = 0

    def run(self, output: SchedulerOutput) -> StepResult:
        """The result of a step: a token for each row whose known tokens are all computed."""
        for seq_id in output.finished_seq_ids:
            self.num_known.pop(seq_id, None)
            self.total_computed -= self.num_computed.pop(seq_id, 0)
        results = []
        num_known, num_computed = self.num_known, self.num_computed
        for row in output.rows:
            seq_id = row.seq_id
            end = row.num_computed_tokens + row.num_new_tokens
            if isinstance(row, NewRow):
                known = len(row.token_ids)
                self.total_computed += row.num_computed_tokens
            else:
                known = num_known[seq_id]
            self.total_computed += row.num_new_tokens
            num_computed[seq_id] = end
            is_sampled = end == known
            num_known[seq_id] = known + is_sampled
            results.append(_SAMPLED if is_sampled else _NOT_SAMPLED)
        return StepResult(tuple(results))


class Replica:
    """Serves requests in simulated time. Whoever drives it calls `wake` at `wake_time`, and `submit` at any time."""

    def __init__(self, deployment: Deployment, measurements: Measurements) -> None:
        """An idle engine that reports to `measurements`."""
        self.wake_time: float | None = None  # when a step's result is there; None = idle
        self.load = 0  # unfinished requests
        self._deployment = deployment
        self._measurements = measurements
        self._manager = BlockManager(
            deployment.num_blocks,
            deployment.block_size,
            num_host_blocks=deployment.num_host_blocks,
            enable_prefix_caching=deployment.enable_prefix_caching,
        )
        self._scheduler = Scheduler(deployment.config, self._manager)
        self._sequences = _Sequences()
        self._in_flight: deque[tuple[SchedulerOutput, StepResult, float]] = deque()  # with the time of the end
        self._token_times: dict[str, float] = {}  # of the last token, by request_id

    @property
    def stats(self) -> SchedulerStats:
        """The scheduler's own counters."""
        return self._scheduler.stats

    def submit(self, request: Request, now: float) -> list[RequestReport]:
        """Queue a request, and begin a step if the engine is idle; what ended at once, for want of room or time.

        Raises:
            RequestRefused: if it could never run.
        """
        self._scheduler.add(request, now)
        self.load += 1
        if self.wake_time is None:
            self._launch(now)
        return self._take_ended()

    def wake(self, now: float) -> list[RequestReport]:
        """Take the result of the step that ends now, and begin the next; the requests that have ended."""
        output, result, _ = self._in_flight.popleft()
        for update in self._scheduler.update(output, result, now):
            if update.token_ids:
                last = self._token_times.get(update.request_id)
                if last is not None:
                    self._measurements.take_gap(now - last)
                self._token_times[update.request_id] = now
        self._launch(now)
        return self._take_ended()

    def check_integrity(self) -> None:
        """Prove that the scheduler's books agree; see Scheduler.check_integrity."""
        self._scheduler.check_integrity()

    def _launch(self, now: float) -> None:
        """Schedule as many steps as the engine keeps in flight."""
        while self._scheduler.has_runnable and len(self._in_flight) <= self._deployment.num_steps_ahead:
            output = self._scheduler.schedule(now)
            if not output.rows and not self._in_flight and not self._scheduler.has_runnable:
                self._scheduler.update(output, self._sequences.run(output), now)  # all that could have run was dropped
                break
            begin = max(now, self._in_flight[-1][2]) if self._in_flight else now
            seconds = self._deployment.cost.seconds(StepWork.of(output)) if output.rows else 0.0
            self._in_flight.append((output, self._sequences.run(output), begin + seconds))
            self._measure(seconds)
        self.wake_time = self._in_flight[0][2] if self._in_flight else None

    def _measure(self, seconds: float) -> None:
        """Count what a step holds for as long as it runs."""
        block_size = self._manager.block_size
        measurements = self._measurements
        # A trace's requests share whole blocks alone, which hold a token in every slot.
        num_stored = self._sequences.total_computed - self._manager.num_saved_blocks * block_size
        measurements.busy_seconds += seconds
        measurements.token_slot_seconds += seconds * num_stored
        measurements.used_slot_seconds += seconds * self._manager.num_used_blocks * block_size
        measurements.slot_seconds += seconds * self._manager.num_blocks * block_size
        measurements.row_seconds += seconds * len(self._sequences.num_known)

    def _take_ended(self) -> list[RequestReport]:
        self._scheduler.take_dropped()  # the ledger's report says the same
        ended = self._scheduler.ledger.take_ended()
        for report in ended:
            self._token_times.pop(report.request_id, None)
            self._measurements.take_end(report)
        self.load -= len(ended)
        return ended
