"""Measures at start what decides between the two ways to bring back a preempted sequence: recompute it, or swap it.

Runs steps on a cache that holds nothing yet. Knows no request.
"""

import time
from dataclasses import dataclass

from models.runner import ModelRunner
from scheduler.output import NewRow, SchedulerOutput
from scheduler.sampling_params import SamplingParams
from server.engine_config import EngineConfig

_MOST_TOKENS = 1024  # of the step that is timed


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """What it takes to bring back a sequence. Zeros where there is nothing to choose."""

    recompute_seconds_per_token: float = 0.0
    swap_seconds_per_block: float = 0.0  # one way


def preemption_costs(
    runner: ModelRunner, config: EngineConfig, max_model_len: int, num_host_blocks: int
) -> PreemptionCosts:
    """Time a prefill step and a swap on this device, where there are host blocks to swap to."""
    if not num_host_blocks:
        return PreemptionCosts()
    return PreemptionCosts(recompute_seconds_per_token=_recompute_seconds(runner, config, max_model_len))


def _recompute_seconds(runner: ModelRunner, config: EngineConfig, max_model_len: int) -> float:
    """Seconds per token of a prefill step; the first of two is not timed, since it may compile kernels."""
    num_tokens = min(config.max_num_batched_tokens or 1, max_model_len, _MOST_TOKENS)
    block_ids = tuple(range(-(-num_tokens // config.block_size)))
    params = SamplingParams(max_tokens=1)
    seconds = 0.0
    for seq_id in range(2):
        row = NewRow(seq_id, 0, (0,) * num_tokens, num_tokens, params, block_ids, 0, num_tokens)
        started = time.perf_counter()
        runner.execute(SchedulerOutput((row,)))
        seconds = time.perf_counter() - started
        runner.execute(SchedulerOutput((), finished_seq_ids=(seq_id,)))
    return seconds / num_tokens
