"""Builds the engine's device half: the model, the KV cache sized to the device, and the runner, warmed up.

Knows no requests and no scheduler but its configuration; server/engine.py puts the two halves together.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from kernels.attention.backend import AttentionBackend, select_backend
from kernels.model_ops.ops import select_ops
from models.cuda_graphs import CudaGraphs, GraphableBackend
from models.decoder import Decoder
from models.loader import load_model
from models.memory import gpu_cache_bytes, graph_bytes
from models.packed_weights import PackedWeights
from models.runner import ModelRunner
from paged_cache.kv_cache import KVCache
from paged_cache.spec import KVCacheSpec
from scheduler.config import SchedulerConfig
from scheduler.output import NewRow
from server.engine_config import EngineConfig
from server.engine_sizing import (
    fill_in_for,
    kv_cache_spec,
    max_model_len_of,
    num_host_kv_blocks,
    num_kv_blocks,
    refuse_cache_dtype,
    scheduler_config,
    select_device,
    select_dtype,
    select_quantization,
    sizes_of_graphs,
)
from server.messages import EngineInfo
from server.preemption_costs import preemption_costs
from server.startup_steps import largest_step, warm_up


@dataclass(frozen=True, slots=True)
class DeviceHalf:
    """What executes steps, and what the scheduler's half must agree with.

    Attributes:
        config: with what was left to the device filled in.
        runner: warmed up, over `info.num_blocks` blocks.
        kv_cache: whose blocks the runner fills.
        scheduling: limits for the scheduler.
        num_host_blocks: KV blocks in host memory, beside those of `info`.
        info: for the edge.
    """

    config: EngineConfig
    runner: ModelRunner
    kv_cache: KVCache
    scheduling: SchedulerConfig
    num_host_blocks: int
    info: EngineInfo


def build_device_half(config: EngineConfig, on_progress: Callable[[str, int, int], None]) -> DeviceHalf:
    """Load the model, size the cache, capture graphs and warm up.

    Args:
        config: from the edge's settings.
        on_progress: called with the stage, and how much of it is done of how much in all.

    Raises:
        UnservableSettings, ModelError, BackendUnavailableError, NotEnoughMemory: for a person to read.
    """
    started = time.monotonic()
    if config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)
    device = select_device(config.device)
    config = fill_in_for(device, config)
    backend = select_backend(config.attention_backend, device, batch_invariant=config.batch_invariant)
    refuse_cache_dtype(config.kv_cache_dtype, backend.name, device)
    quantization = select_quantization(config, backend.name)
    ops = select_ops(backend.name, device, batch_invariant=config.batch_invariant)
    model = load_model(
        Path(config.model_path),
        select_dtype(config, device),
        device,
        ops,
        lambda done, total: on_progress("weights", done, total),
        quantization,
        _packed_weights(config),
    )
    spec = kv_cache_spec(model, config, quantization)
    longest = max_model_len_of(model, config)
    batch_sizes = sizes_of_graphs(config, device, backend)
    num_blocks = num_kv_blocks(
        config, spec, longest, device, lambda: _card_bytes(config, model, backend, spec, longest, batch_sizes)
    )
    # A sequence longer than the whole pool could never end: the limit that clients see says so from the start.
    max_model_len = min(longest, num_blocks * config.block_size)
    num_host_blocks = num_host_kv_blocks(config, spec)
    kv_cache = KVCache(spec, num_blocks, device, num_host_blocks)
    graphs = _capture_graphs(model, backend, kv_cache, batch_sizes, max_model_len, on_progress)
    runner = ModelRunner(
        model, backend, kv_cache, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len, graphs=graphs
    )
    if device.type != "cpu":
        warm_up(runner, config, max_model_len)
    costs = preemption_costs(runner, config, max_model_len, num_blocks, num_host_blocks)
    scheduling = scheduler_config(config, max_model_len, model.config.eos_token_ids, costs)
    info = EngineInfo(
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=config.block_size,
        vocab_size=model.config.vocab_size,
        hidden_size=model.config.hidden_size,
        attention_backend=backend.name,
        device=str(device),
        dtype=spec.dtype,
        load_seconds=time.monotonic() - started,
        kv_cache_bytes=num_blocks * spec.bytes_per_block,
        enable_prefix_caching=config.enable_prefix_caching,
        quantization=quantization,
        max_num_seqs=scheduling.max_num_seqs,
        max_num_batched_tokens=scheduling.max_num_batched_tokens,
        async_scheduling=bool(config.async_scheduling),
    )
    return DeviceHalf(config, runner, kv_cache, scheduling, num_host_blocks, info)


def _packed_weights(config: EngineConfig) -> PackedWeights | None:
    """The cache folder's part for them."""
    if config.home is None:
        return None
    try:
        return PackedWeights(Path(config.home).expanduser() / "packed", torch.get_num_threads())
    except RuntimeError:  # ~ of a user who has no home directory
        return None


def _card_bytes(
    config: EngineConfig,
    model: Decoder,
    backend: AttentionBackend,
    spec: KVCacheSpec,
    max_model_len: int,
    batch_sizes: list[int],
) -> int:
    """What the card has left for the cache beside the largest step and the graphs."""
    device = model.device

    def run_largest_step() -> None:
        output = largest_step(config, max_model_len)
        kv_cache = KVCache(spec, sum(len(row.block_ids) for row in output.rows if isinstance(row, NewRow)), device)
        runner = ModelRunner(model, backend, kv_cache, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len)
        runner.execute(output)

    for_graphs = graph_bytes(batch_sizes, model.config.vocab_size)
    return gpu_cache_bytes(device, config.gpu_memory_utilization, run_largest_step, for_graphs)


def _capture_graphs(
    model: Decoder,
    backend: AttentionBackend,
    kv_cache: KVCache,
    batch_sizes: list[int],
    max_model_len: int,
    on_progress: Callable[[str, int, int], None],
) -> CudaGraphs | None:
    if not batch_sizes:
        return None
    longest = -(-max_model_len // kv_cache.spec.block_size)
    graphs = CudaGraphs(model, cast("GraphableBackend", backend), kv_cache, batch_sizes, longest)
    graphs.capture(lambda done, total: on_progress("graphs", done, total))
    return graphs
