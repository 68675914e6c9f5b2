"""Servers of the PagedAttention paper in simulated time, over the same slots of KV cache and the same cost of a step.

Ours is the real scheduler and block manager. Those beside it reserve contiguous slots for a request's whole life: three
that schedule by iteration as Orca does and differ in what they reserve, and one that runs whole batches (section 6.1).
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from benchmarks.buddy_allocator import BuddyAllocator, Region, power_of_two
from benchmarks.paper_workloads import MAX_MODEL_LEN, Job
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.simulate.deployment import Deployment
from scheduler.simulate.measurements import Measurements
from scheduler.simulate.replica import Replica
from scheduler.simulate.step_cost import StepCost, StepWork

# What a contiguous server reserves for a request (section 6.1): it knows the answer's length, knows it but for a factor
# of two, or knows nothing.
RESERVATIONS: dict[str, Callable[[Job], int]] = {
    "oracle": lambda job: job.num_tokens,
    "pow2": lambda job: min(job.num_prompt_tokens + power_of_two(job.num_output_tokens), MAX_MODEL_LEN),
    "max": lambda _job: MAX_MODEL_LEN,
}


@dataclass(slots=True)
class Served:
    """What a server did with some requests. Shares and means are over the time in which steps ran."""

    latencies: list[float] = field(default_factory=list)  # normalised: seconds to the last token, by generated token
    end: float = 0.0
    num_output_tokens: int = 0
    busy_seconds: float = 0.0
    row_seconds: float = 0.0  # sequences that hold slots
    token_slot_seconds: float = 0.0  # slots with a token
    later_slot_seconds: float = 0.0  # reserved for tokens that are still to come
    unused_slot_seconds: float = 0.0  # reserved, and no token ever comes
    slot_seconds: float = 0.0  # all slots there are
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0

    @property
    def normalised_latency(self) -> float:
        """Mean over the requests, in seconds per token."""
        return fmean(self.latencies)

    @property
    def late_latency(self) -> float:
        """The same over the half that ended last: who is overloaded looks well until its queue has grown."""
        return fmean(self.latencies[len(self.latencies) // 2 :])

    @property
    def tokens_per_second(self) -> float:
        """Generated, from the first arrival to the last answer's end."""
        return self.num_output_tokens / self.end

    @property
    def mean_rows(self) -> float:
        """Requests in the batch."""
        return self.row_seconds / self.busy_seconds

    @property
    def token_share_of_reserved(self) -> float:
        """Of the slots that requests hold, those with a token."""
        reserved = self.token_slot_seconds + self.later_slot_seconds + self.unused_slot_seconds
        return self.token_slot_seconds / reserved

    @property
    def shares(self) -> dict[str, float]:
        """Of all slots: with a token, reserved for later, reserved for nothing, and not reserved."""
        parts = {
            "tokens": self.token_slot_seconds / self.slot_seconds,
            "reserved_for_later": self.later_slot_seconds / self.slot_seconds,
            "never_used": self.unused_slot_seconds / self.slot_seconds,
        }
        return {**parts, "not_reserved": 1.0 - sum(parts.values())}

    def take(self, job: Job, end: float) -> None:
        """Count an answer that is complete."""
        self.latencies.append((end - job.arrival) / job.num_output_tokens)
        self.num_output_tokens += job.num_output_tokens
        self.end = max(self.end, end)


def serve_paged(jobs: Sequence[Job], deployment: Deployment, *, while_waiting: bool = False) -> Served:
    """Serve by the real scheduler over a paged cache.

    Args:
        jobs: in the order of their arrival; the prompts have nothing in common.
        deployment: of which one replica is simulated.
        while_waiting: measure as long as requests wait for their admission, and stop there: the cache is full.
    """
    measurements = Measurements()
    replica = Replica(deployment, measurements)
    served = Served()
    arriving = deque(enumerate(jobs))
    while arriving or replica.wake_time is not None:
        if arriving and (replica.wake_time is None or arriving[0][1].arrival < replica.wake_time):
            number, job = arriving.popleft()
            params = SamplingParams(max_tokens=job.num_output_tokens, ignore_eos=True)
            prompt = (2 + number, *(0,) * (job.num_prompt_tokens - 1))  # none begins as another does
            replica.submit(Request(str(number), prompt, params, arrival_time=job.arrival), job.arrival)
            continue
        assert replica.wake_time is not None
        for report in replica.wake(replica.wake_time):
            assert report.ended_time is not None and report.drop_cause is None
            served.take(jobs[int(report.request_id)], report.ended_time)
        if while_waiting and not arriving and replica.stats.num_queued_tokens == 0:
            break
    served.busy_seconds = measurements.busy_seconds
    served.row_seconds = measurements.row_seconds
    served.token_slot_seconds = measurements.token_slot_seconds
    served.unused_slot_seconds = measurements.used_slot_seconds - measurements.token_slot_seconds
    served.slot_seconds = measurements.slot_seconds
    served.num_preemptions = replica.stats.num_preemptions
    served.num_recomputed_tokens = replica.stats.num_recomputed_tokens
    return served


@dataclass(slots=True)
class _Batch:
    """Requests that run together, summed up so that a step costs the same whatever their number."""

    num_rows: int = 0
    num_tokens: int = 0  # in slots
    num_final_tokens: int = 0  # in slots, once all have ended
    num_slots: int = 0  # reserved

    def enter(self, job: Job, num_slots: int) -> None:
        """A prompt that the next step computes."""
        self.num_rows += 1
        self.num_tokens += job.num_prompt_tokens
        self.num_final_tokens += job.num_tokens - 1  # the last token is never computed on
        self.num_slots += num_slots

    def leave(self, job: Job, num_slots: int) -> None:
        """An answer whose last token has been sampled."""
        self.num_rows -= 1
        self.num_tokens -= job.num_tokens - 1
        self.num_final_tokens -= job.num_tokens - 1
        self.num_slots -= num_slots


def serve_contiguous(
    jobs: Sequence[Job],
    cost: StepCost,
    reservation: str,
    num_slots: int,
    max_num_seqs: int,
    *,
    while_waiting: bool = False,
) -> Served:
    """Serve iteration by iteration, first come first served, each request in slots that lie side by side.

    Args:
        jobs: in the order of their arrival.
        cost: of a step.
        reservation: one of `RESERVATIONS`.
        num_slots: of the KV cache.
        max_num_seqs: requests in the batch.
        while_waiting: measure as long as requests wait, and stop there.
    """
    allocator = BuddyAllocator(num_slots)
    served, batch = Served(), _Batch()
    arriving, waiting = deque(jobs), deque[Job]()
    running: list[tuple[int, int, Job, Region]] = []  # heap by the step that samples the last token
    now, step = 0.0, 0
    while arriving or waiting or running:
        if not waiting and not running:
            now = max(now, arriving[0].arrival)
        while arriving and arriving[0].arrival <= now:
            waiting.append(arriving.popleft())
        admitted = []
        while waiting and batch.num_rows < max_num_seqs:
            region = allocator.allocate(RESERVATIONS[reservation](waiting[0]))
            if region is None:
                break
            job = waiting.popleft()
            batch.enter(job, region.num_slots)
            admitted.append(job)
            heapq.heappush(running, (step + job.num_output_tokens, region.start, job, region))
        if while_waiting and not waiting and not arriving:
            break
        num_decodes = batch.num_rows - len(admitted)
        batch.num_tokens += num_decodes
        seconds = cost.seconds(_work(batch, admitted, num_decodes))
        _measure(served, batch, seconds, num_slots)
        now += seconds
        step += 1
        while running and running[0][0] == step:
            _, _, job, region = heapq.heappop(running)
            allocator.release(region)
            batch.leave(job, region.num_slots)
            served.take(job, now)
    return served


def serve_statically(jobs: Sequence[Job], cost: StepCost, num_slots: int) -> Served:
    """Serve whole batches: the requests that wait run together until the last of them has ended, then the next ones.

    Each has slots for the longest answer there may be. A row that has ended is computed on to the end of its batch,
    since the shape of a batch is fixed; its answer counts as complete when its own last token is there.
    """
    most_rows = num_slots // MAX_MODEL_LEN
    served = Served()
    arriving = deque(jobs)
    now = 0.0
    while arriving:
        now = max(now, arriving[0].arrival)
        rows: list[Job] = []
        while arriving and arriving[0].arrival <= now and len(rows) < most_rows:
            rows.append(arriving.popleft())
        batch = _Batch()
        for job in rows:
            batch.enter(job, MAX_MODEL_LEN)
        by_length = deque(sorted(rows, key=lambda job: job.num_output_tokens))
        for step in range(1, by_length[-1].num_output_tokens + 1):
            is_first = step == 1
            batch.num_tokens += 0 if is_first else len(by_length)  # rows that have ended fill no more slots
            seconds = cost.seconds(_work(batch, rows if is_first else [], 0 if is_first else len(rows)))
            _measure(served, batch, seconds, num_slots)
            now += seconds
            while by_length and by_length[0].num_output_tokens == step:
                served.take(by_length.popleft(), now)
    return served


def _work(batch: _Batch, prompts: Sequence[Job], num_decodes: int) -> StepWork:
    return StepWork(
        num_rows=num_decodes + len(prompts),
        num_tokens=num_decodes + sum(job.num_prompt_tokens for job in prompts),
        num_context_tokens=batch.num_tokens,
        num_attention_pairs=sum(job.num_prompt_tokens * (job.num_prompt_tokens + 1) / 2 for job in prompts),
    )


def _measure(served: Served, batch: _Batch, seconds: float, num_slots: int) -> None:
    served.busy_seconds += seconds
    served.row_seconds += seconds * batch.num_rows
    served.token_slot_seconds += seconds * batch.num_tokens
    served.later_slot_seconds += seconds * (batch.num_final_tokens - batch.num_tokens)
    served.unused_slot_seconds += seconds * (batch.num_slots - batch.num_final_tokens)
    served.slot_seconds += seconds * num_slots
