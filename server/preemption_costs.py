"""Measures at start what decides between the two ways to bring back a preempted sequence: recompute it, or swap it.

Runs steps on a cache that holds nothing yet. Knows no request.
"""

import time
from dataclasses import dataclass

import torch

from models.runner import ModelRunner
from scheduler.output import BlockCopy, NewRow, SchedulerOutput
from scheduler.sampling_params import SamplingParams
from server.engine_config import EngineConfig

_MOST_TOKENS = 1024  # of the step that is timed
_MOST_BLOCKS = 64  # of the swaps that are


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """What it takes to bring back a sequence. Zeros where there is nothing to choose."""

    recompute_seconds_per_token: float = 0.0
    swap_seconds_per_block: float = 0.0  # one way


def preemption_costs(
    runner: ModelRunner, config: EngineConfig, max_model_len: int, num_blocks: int, num_host_blocks: int
) -> PreemptionCosts:
    """Time a prefill step and a swap on this device, where there are host blocks to swap to."""
    if not num_host_blocks:
        return PreemptionCosts()
    return PreemptionCosts(
        _recompute_seconds(runner, config, max_model_len),
        _swap_seconds(runner, min(num_blocks, num_host_blocks, _MOST_BLOCKS)),
    )


def _recompute_seconds(runner: ModelRunner, config: EngineConfig, max_model_len: int) -> float:
    """Seconds per token of a prefill step."""
    assert config.max_num_batched_tokens is not None, "what is left to the device has been filled in"
    num_tokens = min(config.max_num_batched_tokens, max_model_len, _MOST_TOKENS)
    block_ids = tuple(range(-(-num_tokens // config.block_size)))
    params = SamplingParams(max_tokens=1)
    row = NewRow(0, 0, (0,) * num_tokens, num_tokens, params, block_ids, 0, num_tokens)
    return _seconds_of(runner, SchedulerOutput((row,)), SchedulerOutput((), finished_seq_ids=(0,))) / num_tokens


def _swap_seconds(runner: ModelRunner, num_blocks: int) -> float:
    """Seconds for a block, one way."""
    moves = tuple(BlockCopy(block_id, block_id) for block_id in range(num_blocks))
    out, back = SchedulerOutput((), swapped_out=moves), SchedulerOutput((), swapped_in=moves)
    return _seconds_of(runner, out, back) / (2 * num_blocks)


def _seconds_of(runner: ModelRunner, *steps: SchedulerOutput) -> float:
    """How long these steps take when they are run a second time: the first may compile kernels, or touch new pages."""
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        for step in steps:
            runner.execute(step)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - started
    return seconds
