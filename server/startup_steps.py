"""The steps that are run before the first request: one that shows how much memory is needed, and two that warm up.

Knows the scheduler's messages and the settings; no model and no requests.
"""

from models.runner import ModelRunner
from scheduler.output import KnownRow, NewRow, SchedulerOutput
from scheduler.sampling_params import SamplingParams
from server.engine_config import EngineConfig


def warm_up(runner: ModelRunner, config: EngineConfig, max_model_len: int) -> None:
    """Run a prompt and one more token, so that no kernel is compiled while a request waits for it."""
    num_tokens = min(config.max_num_batched_tokens, max_model_len) - 1
    if num_tokens < 1:
        return
    blocks = tuple(range(-(-num_tokens // config.block_size)))
    sampling = SamplingParams(max_tokens=2, temperature=1.0, top_k=1, top_p=0.5, min_p=0.1, logprobs=1)
    prompt = NewRow(0, 0, (0,) * num_tokens, num_tokens, sampling, blocks, 0, num_tokens)
    new_blocks = (len(blocks),) if num_tokens % config.block_size == 0 else ()
    runner.execute(SchedulerOutput((prompt,)))
    runner.execute(SchedulerOutput((KnownRow(0, new_blocks, None, num_tokens, 1),)))
    runner.execute(SchedulerOutput((), finished_seq_ids=(0,)))


def largest_step(config: EngineConfig, max_model_len: int) -> SchedulerOutput:
    """The step with the greatest need of memory: the whole token budget, and as many rows that sample as can be."""
    num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    num_tokens = min(config.max_num_batched_tokens // num_rows, max_model_len)
    num_blocks = -(-num_tokens // config.block_size)
    params = SamplingParams(max_tokens=1, temperature=1.0, top_k=1, top_p=0.5, min_p=0.1, logprobs=1)
    rows = tuple(
        NewRow(
            seq_id=i,
            index=0,
            token_ids=(0,) * num_tokens,
            num_prompt_tokens=num_tokens,
            params=params,
            block_ids=tuple(range(i * num_blocks, (i + 1) * num_blocks)),
            num_computed_tokens=0,
            num_new_tokens=num_tokens,
        )
        for i in range(num_rows)
    )
    return SchedulerOutput(rows)
