"""How many KV blocks sharing saves: several answers to a prompt, and beams (PagedAttention paper, section 6.3).

What n answers share follows from their lengths, so the scheduler runs without a model. What beams share depends on
which of them survive, so they are searched with a real one. Saved = blocks that would be needed besides, over all that
would be.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.measured_engine import MeasuredModel, serve_measured
from benchmarks.paper_workloads import DATA_SETS, MAX_MODEL_LEN, DataSet, Job
from paged_cache.manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.output import NewRow, RowResult, SchedulerOutput, StepResult
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

WIDTHS = (2, 4, 6)
BLOCK_SIZE = 16
_TOKEN = RowResult((1,))
_NO_TOKEN = RowResult()


@dataclass(frozen=True, slots=True)
class Saving:
    """Blocks saved by sharing, over all steps of all requests."""

    data_set: str
    method: str  # "parallel" or "beam"
    width: int
    num_requests: int
    share: float  # saved blocks / blocks without sharing


@dataclass(slots=True)
class _Blocks:
    """Sums over steps. Every step counts the same, so it matters little which requests run beside each other."""

    num_saved: int = 0
    num_used: int = 0

    def count(self, manager_used: int, manager_saved: int) -> None:
        self.num_used += manager_used
        self.num_saved += manager_saved

    @property
    def share(self) -> float:
        return self.num_saved / (self.num_saved + self.num_used)


def parallel_sampling(data_set: DataSet, width: int, num_requests: int) -> Saving:
    """`width` answers to each prompt, through the scheduler alone."""
    jobs = data_set.typical_jobs(num_requests, seed=0)
    num_blocks = width * sum(-(-job.num_tokens // BLOCK_SIZE) for job in jobs) + width * num_requests
    config = SchedulerConfig(width * num_requests, width * num_requests * MAX_MODEL_LEN, MAX_MODEL_LEN)
    scheduler = Scheduler(config, BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=False))
    for number, job in enumerate(jobs):
        params = SamplingParams(max_tokens=job.num_output_tokens, n=width, ignore_eos=True)
        scheduler.add(Request(str(number), (1,) * job.num_prompt_tokens, params, arrival_time=0.0))
    blocks = _Blocks()
    num_known: dict[int, int] = {}
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        stats = scheduler.stats
        blocks.count(stats.num_used_blocks, stats.num_saved_blocks)
        scheduler.update(output, _sampled(output, num_known))
        scheduler.ledger.take_ended()
    return Saving(data_set.name, "parallel", width, num_requests, blocks.share)


def _sampled(output: SchedulerOutput, num_known: dict[int, int]) -> StepResult:
    """A token for each row whose known tokens are all computed."""
    results = []
    for row in output.rows:
        known = len(row.token_ids) if isinstance(row, NewRow) else num_known[row.seq_id]
        is_sampled = row.end == known
        num_known[row.seq_id] = known + is_sampled
        results.append(_TOKEN if is_sampled else _NO_TOKEN)
    return StepResult(tuple(results))


def beam_search(
    model: MeasuredModel, data_set: DataSet, width: int, jobs: Sequence[Job], advance: Callable[[int], None]
) -> Saving:
    """Search with `width` beams for the answer to each of some stretches of text."""
    num_blocks = width * sum(-(-job.num_tokens // BLOCK_SIZE) + 1 for job in jobs)
    config = SchedulerConfig(width * len(jobs), MAX_MODEL_LEN, MAX_MODEL_LEN)
    blocks = _Blocks()

    def watch(scheduler: Scheduler, _seconds: float) -> None:
        stats = scheduler.stats
        blocks.count(stats.num_used_blocks, stats.num_saved_blocks)

    serve_measured(model, jobs, config, num_blocks, BLOCK_SIZE, beam_width=width, watch=watch, advance=advance)
    return Saving(data_set.name, "beam", width, len(jobs), blocks.share)


def sharing_savings(
    model: MeasuredModel | None, num_searched: dict[str, int], advance: Callable[[int], None]
) -> list[Saving]:
    """All widths of both methods on both data sets; without a model, of parallel sampling alone."""
    savings = [parallel_sampling(data_set, width, 60) for data_set in DATA_SETS for width in WIDTHS]
    if model is not None:
        for data_set in DATA_SETS:
            jobs = data_set.typical_jobs(num_searched[data_set.name], seed=0)
            savings += [beam_search(model, data_set, width, jobs, advance) for width in WIDTHS]
    return savings
