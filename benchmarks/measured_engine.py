"""The real engine in one process, driven step by step, on a clock that is the sum of what its steps took.

Nobody waits for an arrival: while nothing runs the clock jumps to the next one. So runs at a low rate take no longer
than their work. Greedy, without end tokens: every answer has the length that is asked for.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.paper_servers import Served
from benchmarks.paper_workloads import MAX_MODEL_LEN, Job
from kernels.attention.backend import select_backend
from kernels.model_ops.ops import select_ops
from models.loader import load_model
from models.runner import ModelRunner
from paged_cache.kv_cache import KVCache
from paged_cache.manager import BlockManager
from paged_cache.spec import KVCacheSpec
from scheduler.config import SchedulerConfig
from scheduler.request import Request
from scheduler.sampling_params import BeamSearch, SamplingParams
from scheduler.scheduler import Scheduler
from server.tokenizer import load_tokenizer
from tests import data_files


class MeasuredModel:
    """A model with its weights, and a text to take prompts from."""

    def __init__(self, model_path: Path) -> None:
        """Load in float32 on the CPU."""
        self.name = model_path.name
        self.device = torch.device("cpu")
        self.backend = select_backend("auto", self.device)
        ops = select_ops(self.backend.name, self.device, batch_invariant=False)
        self.model = load_model(model_path, torch.float32, self.device, ops, lambda _done, _total: None)
        text = "\n\n".join((*data_files.mt_bench_prompts(), *data_files.gsm8k_prompts()))
        self._text = tuple(load_tokenizer(model_path).encode(text))

    def spec(self, block_size: int) -> KVCacheSpec:
        """The shape of its cache."""
        config = self.model.config
        return KVCacheSpec(len(config.layers), config.num_kv_heads, config.head_dim, block_size, "float32")

    def runner(
        self, block_size: int, num_blocks: int, max_num_seqs: int, num_host_blocks: int = 0
    ) -> tuple[ModelRunner, KVCache]:
        """A runner over a cache of its own."""
        kv_cache = KVCache(self.spec(block_size), num_blocks, self.device, num_host_blocks)
        runner = ModelRunner(self.model, self.backend, kv_cache, max_num_seqs=max_num_seqs, max_model_len=MAX_MODEL_LEN)
        return runner, kv_cache

    def prompts(self, jobs: Sequence[Job], seed: int) -> list[tuple[int, ...]]:
        """A stretch of text for each job, from random places."""
        chance = random.Random(seed)
        starts = [chance.randrange(len(self._text) - job.num_prompt_tokens) for job in jobs]
        return [self._text[start : start + job.num_prompt_tokens] for start, job in zip(starts, jobs, strict=True)]


def serve_measured(
    model: MeasuredModel,
    jobs: Sequence[Job],
    config: SchedulerConfig,
    num_blocks: int,
    block_size: int,
    *,
    beam_width: int = 0,
    watch: Callable[[Scheduler, float], None] = lambda _scheduler, _seconds: None,
    advance: Callable[[int], None] = lambda _: None,
) -> Served:
    """Serve by the engine's own scheduler, cache and model.

    Args:
        model: with its weights.
        jobs: in the order of their arrival.
        config: limits.
        num_blocks: of the cache.
        block_size: tokens in a block.
        beam_width: search with so many beams; 0 = greedy.
        watch: told of the scheduler after each step, and of the seconds it took.
        advance: told how many answers are complete since the last call.
    """
    # Texts may begin alike by chance: what is compared here must not.
    manager = BlockManager(num_blocks, block_size, enable_prefix_caching=False)
    scheduler = Scheduler(config, manager)
    runner, _ = model.runner(block_size, num_blocks, config.max_num_seqs)
    arriving = deque(zip(jobs, model.prompts(jobs, seed=0), strict=True))
    served = Served()
    now = 0.0
    while arriving or scheduler.has_unfinished:
        if not scheduler.has_unfinished:
            now = max(now, arriving[0][0].arrival)
        while arriving and arriving[0][0].arrival <= now:
            job, prompt = arriving.popleft()
            number = len(jobs) - len(arriving) - 1
            scheduler.add(Request(str(number), prompt, _params(job, beam_width), arrival_time=job.arrival), now)
        begin = time.perf_counter()
        output = scheduler.schedule(now)
        result = runner.execute(output)
        updates = scheduler.update(output, result, now)
        seconds = time.perf_counter() - begin
        now += seconds
        served.busy_seconds += seconds
        served.row_seconds += seconds * len(output.rows)
        watch(scheduler, seconds)
        num_ended = 0
        for update in updates:
            if update.finish_reason is not None and update.index == 0:
                served.take(jobs[int(update.request_id)], now)
                num_ended += 1
        scheduler.ledger.take_ended()
        if num_ended:
            advance(num_ended)
    served.num_preemptions = scheduler.stats.num_preemptions
    served.num_recomputed_tokens = scheduler.stats.num_recomputed_tokens
    return served


def _params(job: Job, beam_width: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=job.num_output_tokens,
        temperature=0.0,
        ignore_eos=True,
        beam_search=BeamSearch(beam_width) if beam_width else None,
    )
