"""Serves requests with the scheduler and the model runner, without HTTP, and keeps the time of each step.

Two loops over the same calls: each step after the results of the last one, or launched before they are read. The model
has random weights. Knows no results file.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from kernels.attention.backend import AttentionBackend, select_backend
from kernels.model_ops.ops import select_ops
from models.config import ModelConfig
from models.cuda_graphs import CudaGraphs
from models.decoder import Decoder
from models.graph_recorder import CudaGraphRecorder, GraphRecorder
from models.runner import ModelRunner
from paged_cache.kv_cache import KVCache
from paged_cache.manager import BlockManager
from paged_cache.spec import KVCacheSpec
from scheduler.config import SchedulerConfig
from scheduler.output import SchedulerOutput, SequenceUpdate
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 1}


@dataclass(frozen=True, slots=True)
class Engine:
    """What all runs share."""

    model: Decoder
    backend: AttentionBackend
    kv_cache: KVCache
    synchronise: Callable[[], None]  # waits for the device


@dataclass(frozen=True, slots=True)
class Way:
    """How steps are run."""

    graphs: CudaGraphs | None
    is_overlapped: bool

    @property
    def name(self) -> str:
        """Such as "graphs, overlapped"."""
        return ("eager" if self.graphs is None else "graphs") + (", overlapped" if self.is_overlapped else "")


@dataclass(frozen=True, slots=True)
class HostSeconds:
    """What the host does in one step; nothing here waits for the device."""

    schedule: float
    launch: float  # inputs and rows, and the launches themselves
    result: float
    update: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.schedule + self.launch + self.result + self.update


@dataclass(slots=True)
class Served:
    """What came of some requests, and how long it took."""

    tokens: dict[str, list[int]]  # by request id
    logprobs: dict[str, list[float]]  # of those tokens, where the sampling asks for them
    seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)  # of steps in which every request decodes
    host_seconds: list[HostSeconds] = field(default_factory=list)  # of the same, without the wait for the device

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(map(len, self.tokens.values()))


def build_engine(
    config: ModelConfig,
    dtype: str,
    num_blocks: int,
    block_size: int,
    device: torch.device,
    synchronise: Callable[[], None],
    *,
    batch_invariant: bool = False,
) -> Engine:
    """A decoder with random weights, small enough to keep activations finite, over a cache of its own."""
    backend = select_backend("triton", device, batch_invariant=batch_invariant)
    ops = select_ops(backend.name, device, batch_invariant=batch_invariant)
    model = Decoder(config, getattr(torch, dtype), device, ops)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02)
    spec = KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype)
    return Engine(model, backend, KVCache(spec, num_blocks, device), synchronise)


def can_capture() -> bool:
    """Without torch's pool of memory, as compute-sanitizer is run, a capture could not allocate."""
    return os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1"


def make_recorder(device: torch.device) -> GraphRecorder:
    """CUDA graphs; on a CPU, operations recorded one by one."""
    if device.type == "cuda":
        return CudaGraphRecorder(device)
    from tests.models.recorded_graph import CpuGraphRecorder

    return CpuGraphRecorder()


def make_graphs(engine: Engine, batch_sizes: Sequence[int], max_num_blocks: int) -> CudaGraphs:
    """Graphs of these numbers of rows, captured."""
    graphs = CudaGraphs(
        engine.model,
        engine.backend,
        engine.kv_cache,
        batch_sizes,
        max_num_blocks,
        recorder=make_recorder(engine.model.device),
    )
    graphs.capture(lambda _done, _total: None)
    return graphs


def serve(
    engine: Engine,
    way: Way,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    max_batched_tokens: int,
    sampling: Mapping[str, float] = GREEDY,
) -> Served:
    """Serve requests that all arrive at once to their ends, with a pool and a runner of their own."""
    max_model_len = max(map(len, prompts)) + max_tokens
    scheduler = Scheduler(
        SchedulerConfig(len(prompts), max_batched_tokens, max_model_len),
        BlockManager(engine.kv_cache.num_blocks, engine.kv_cache.spec.block_size),
    )
    runner = ModelRunner(
        engine.model,
        engine.backend,
        engine.kv_cache,
        max_num_seqs=len(prompts),
        max_model_len=max_model_len,
        graphs=way.graphs,
    )
    params = SamplingParams(max_tokens, ignore_eos=True, **sampling)
    requests = [Request(str(i), tuple(token_ids), params, arrival_time=0.0) for i, token_ids in enumerate(prompts)]
    for request in requests:
        scheduler.add(request)
    served = Served(*({request.request_id: [] for request in requests} for _ in range(2)))
    engine.synchronise()
    started = time.perf_counter()
    if way.is_overlapped:
        _step_overlapped(scheduler, runner, served)
    else:
        _step_in_turn(scheduler, runner, served, engine.synchronise)
    served.seconds = time.perf_counter() - started
    return served


def _step_in_turn(scheduler: Scheduler, runner: ModelRunner, served: Served, synchronise: Callable[[], None]) -> None:
    """The wait for the device stands alone, so that all the rest of a step is the host's time."""
    while scheduler.has_unfinished:
        times = [time.perf_counter()]
        output = scheduler.schedule()
        times.append(time.perf_counter())
        pending = runner.launch(output)
        times.append(time.perf_counter())
        synchronise()
        times.append(time.perf_counter())
        result = pending.result()
        times.append(time.perf_counter())
        _take(served, scheduler.update(output, result))
        times.append(time.perf_counter())
        if _is_full_decode(output, served):
            schedule, launch, _wait, read, update = (end - start for start, end in pairwise(times))
            served.step_seconds.append(times[-1] - times[0])
            served.host_seconds.append(HostSeconds(schedule, launch, read, update))


def _step_overlapped(scheduler: Scheduler, runner: ModelRunner, served: Served) -> None:
    in_flight = deque()
    last_end = time.perf_counter()
    while scheduler.has_unfinished or in_flight:
        if scheduler.has_unfinished:
            output = scheduler.schedule()
            in_flight.append((output, runner.launch(output)))
        if len(in_flight) == 2 or not scheduler.has_unfinished:
            output, pending = in_flight.popleft()
            _take(served, scheduler.update(output, pending.result()))
            ended = time.perf_counter()
            if _is_full_decode(output, served):
                served.step_seconds.append(ended - last_end)
            last_end = ended


def _take(served: Served, updates: Sequence[SequenceUpdate]) -> None:
    for update in updates:
        served.tokens[update.request_id] += update.token_ids
        served.logprobs[update.request_id] += [score.logprob for score in update.logprobs]


def _is_full_decode(output: SchedulerOutput, served: Served) -> bool:
    return len(output.rows) == len(served.tokens) == output.num_tokens
