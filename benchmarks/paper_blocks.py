"""Measured: what a block's size costs attention, and what it takes to bring a sequence back by copy or by computing.

(PagedAttention paper, section 7, Figures 18 and 19.) One block as long as a whole sequence is the contiguous cache.
Runs the real kernels and the real model on the CPU.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from benchmarks.measured_engine import MeasuredModel
from benchmarks.paper_workloads import MAX_MODEL_LEN
from kernels.attention.metadata import AttentionMetadata, AttentionParams
from paged_cache.kv_cache import KVCache
from scheduler.output import NewRow, SchedulerOutput
from scheduler.sampling_params import SamplingParams

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTIGUOUS = MAX_MODEL_LEN
_NUM_ROWS = 16  # decodes beside each other


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """Seconds of one layer's attention over a batch of decodes."""

    block_size: int
    context: int
    num_rows: int
    seconds: float  # median


@dataclass(frozen=True, slots=True)
class RestoreTime:
    """Seconds to bring back a sequence that gave its blocks away."""

    block_size: int
    num_tokens: int
    swap_out: float  # medians, for the whole sequence
    swap_in: float
    recompute: float


def measure_attention(
    model: MeasuredModel, contexts: tuple[int, ...], num_rounds: int, advance: Callable[[int], None]
) -> list[AttentionTime]:
    """Every block size in each round, so that whatever else the machine does meets all of them alike."""
    cases = [(block_size, context) for block_size in (*BLOCK_SIZES, CONTIGUOUS) for context in contexts]
    batches = {case: _attention_batch(model, *case) for case in cases}
    seconds: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for _ in range(num_rounds):
        for case in cases:
            query, kv_cache, metadata, params = batches[case]
            # One layer after another, as a step does: a layer's keys are not in the processor's cache yet.
            begin = time.perf_counter()
            for layer in kv_cache.layers:
                model.backend.attend(query, layer, metadata, params)
            seconds[case].append((time.perf_counter() - begin) / len(kv_cache.layers))
        advance(1)
    return [AttentionTime(*case, _NUM_ROWS, median(seconds[case])) for case in cases]


def _attention_batch(
    model: MeasuredModel, block_size: int, context: int
) -> tuple[torch.Tensor, KVCache, AttentionMetadata, AttentionParams]:
    config = model.model.config
    per_row = -(-context // block_size)
    kv_cache = KVCache(model.spec(block_size), _NUM_ROWS * per_row, model.device)
    for layer in kv_cache.layers:  # what was never written all lies in one page of zeros, which is read too fast
        layer.key[:, :, :context].fill_(0.1)
        layer.value[:, :, :context].fill_(0.1)
    # In a server that has run for a while the blocks of a sequence lie anywhere.
    tables = np.random.default_rng(0).permutation(_NUM_ROWS * per_row).reshape(_NUM_ROWS, per_row).astype(np.int32)
    starts = np.arange(_NUM_ROWS + 1, dtype=np.int32)
    seq_lens = np.full(_NUM_ROWS, context, dtype=np.int32)
    slots = tables[:, (context - 1) // block_size].astype(np.int64) * block_size + (context - 1) % block_size
    metadata = AttentionMetadata(
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(seq_lens),
        block_tables=torch.from_numpy(tables),
        slot_mapping=torch.from_numpy(slots),
        host_query_start_loc=starts,
        host_seq_lens=seq_lens,
    )
    query = torch.randn(_NUM_ROWS, config.num_q_heads, config.head_dim)
    return query, kv_cache, metadata, AttentionParams(config.attention_scale)


def measure_restoring(
    model: MeasuredModel, num_tokens: int, num_rounds: int, advance: Callable[[int], None]
) -> list[RestoreTime]:
    """Copy a sequence's blocks to the host and back, and compute its tokens again, for every block size."""
    times = []
    for block_size in BLOCK_SIZES:
        num_blocks = num_tokens // block_size
        runner, kv_cache = model.runner(block_size, 4 * num_blocks, 1, num_host_blocks=4 * num_blocks)
        chance = random.Random(0)
        outs, ins, recomputes = [], [], []
        for seq_id in range(num_rounds):
            device_ids = np.array(chance.sample(range(4 * num_blocks), num_blocks), np.int64)
            host_ids = np.array(chance.sample(range(4 * num_blocks), num_blocks), np.int64)
            begin = time.perf_counter()
            kv_cache.swap_out(np.stack([device_ids, host_ids], axis=1))
            middle = time.perf_counter()
            kv_cache.swap_in(np.stack([host_ids, device_ids], axis=1))
            end = time.perf_counter()
            runner.execute(_prefill(seq_id, num_tokens, tuple(device_ids.tolist())))
            recomputes.append(time.perf_counter() - end)
            runner.execute(SchedulerOutput((), finished_seq_ids=(seq_id,)))
            outs.append(middle - begin)
            ins.append(end - middle)
        times.append(RestoreTime(block_size, num_tokens, median(outs), median(ins), median(recomputes)))
        advance(1)
    return times


def _prefill(seq_id: int, num_tokens: int, block_ids: tuple[int, ...]) -> SchedulerOutput:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    row = NewRow(seq_id, 0, (1,) * num_tokens, num_tokens, params, block_ids, 0, num_tokens)
    return SchedulerOutput((row,))
