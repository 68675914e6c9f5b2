"""The engine: the only place that sees both the scheduler and the model runner. Built once, stepped in a loop.

Knows no sockets and no HTTP; the process around it is server/engine_process.py.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import torch

from kernels.attention.backend import AttentionBackend, select_backend
from kernels.model_ops.ops import select_ops
from models.cuda_graphs import CudaGraphs, GraphableBackend, graph_batch_sizes
from models.decoder import Decoder
from models.loader import load_model
from models.memory import GIB, available_host_bytes, gpu_cache_bytes, graph_bytes, host_cache_bytes
from models.runner import ModelRunner
from models.step_outputs import PendingStep
from paged_cache.kv_cache import KVCache
from paged_cache.manager import BlockManager
from paged_cache.spec import KVCacheSpec
from scheduler.admission import RequestRefused
from scheduler.config import SchedulerConfig
from scheduler.grammar import Vocabulary
from scheduler.output import NewRow, SchedulerOutput, SequenceUpdate
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from server.config import EngineConfig
from server.grammar_compilation import GrammarCompilation
from server.messages import EngineInfo, EngineStats, Rejected, Submit
from server.startup_steps import largest_step, warm_up
from server.submission_check import refuse_unknown_token_ids
from server.tokenizer import load_tokenizer

logger = logging.getLogger("octavo.engine")

_CACHE_DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn"}


class UnservableSettings(RuntimeError):
    """The engine cannot serve with these settings; the message is for the person who set them."""


class Engine:
    """Requests in, sequence updates out, one step at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        info: EngineInfo,
        *,
        grammars: GrammarCompilation | None = None,
        async_scheduling: bool = False,
    ) -> None:
        """Wire a scheduler to the runner whose cache its blocks name; see `build_engine`.

        Args:
            scheduler: over the blocks of the runner's cache.
            runner: executes its steps.
            info: for the edge.
            grammars: compiles those that requests ask for; None = such requests are refused.
            async_scheduling: while a step runs on the device, the next one is scheduled and launched behind it.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._grammars = grammars
        self._num_steps_ahead = 1 if async_scheduling else 0
        self._in_flight: deque[tuple[SchedulerOutput, PendingStep]] = deque()  # launched, not updated
        self._num_integrity_failures = 0
        self.info = info

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do, if only to take the result of one that nobody waits for."""
        return self._scheduler.has_runnable or bool(self._in_flight)

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges as of now."""
        return EngineStats(**asdict(self._scheduler.stats), num_integrity_failures=self._num_integrity_failures)

    def submit(self, message: Submit) -> None:
        """Queue a request. One for structured output runs when `take_grammars` has found its grammar compiled.

        Raises:
            RequestRefused: also for a token id that the model does not have, which would end the engine later.
        """
        wanted = message.params.structured_output
        if wanted is not None and self._grammars is None:
            raise RequestRefused(f"{wanted.param} is not supported by this engine.", wanted.param)
        refuse_unknown_token_ids(message, self.info.vocab_size)
        self._scheduler.add(
            Request(
                message.request_id,
                tuple(message.prompt_token_ids),
                message.params,
                message.arrival_time,
                message.priority,
            )
        )
        if wanted is not None and self._grammars is not None:
            self._grammars.request(message.request_id, wanted)

    def take_grammars(self) -> list[Rejected]:
        """Let the requests run whose grammars are compiled by now; those whose grammars cannot be are ended."""
        if self._grammars is None:
            return []
        finished = self._grammars.take_finished()
        for compiled in finished:
            if compiled.state is not None:
                self._scheduler.provide_grammar(compiled.request_id, compiled.state)
            else:
                self._scheduler.abort(compiled.request_id)
        return [Rejected(c.request_id, c.message, c.param, c.is_shortage) for c in finished if c.state is None]

    def abort(self, request_id: str, index: int | None) -> None:
        """End a request or one of its sequences, in whatever state."""
        if self._grammars is not None and index is None:
            self._grammars.give_up(request_id)
        self._scheduler.abort(request_id, index)

    def close(self) -> None:
        """End what runs beside the engine. Nothing is asked of it any more."""
        if self._grammars is not None:
            self._grammars.close()

    def step(self) -> list[SequenceUpdate]:
        """Schedule, launch, update.

        With async scheduling the update is that of the step before, which runs meanwhile: the first of the steps
        brings nothing yet, and when nothing is left to schedule the last result is taken by a step of its own.
        """
        if self._scheduler.has_runnable:
            output = self._scheduler.schedule()
            self._in_flight.append((output, self._runner.launch(output)))
            if len(self._in_flight) <= self._num_steps_ahead:
                return []
        output, pending = self._in_flight.popleft()
        return self._scheduler.update(output, pending.result())

    def check_integrity(self) -> None:
        """Prove that the block pool is whole; if it is not, count and report it and go on serving.

        For an idle engine: while steps are in flight, blocks that are free already may still be written to.
        """
        assert not self._in_flight
        try:
            self._scheduler.check_integrity()
        except AssertionError as error:
            self._num_integrity_failures += 1
            logger.error(
                "The block pool is not whole: %s. Blocks may be lost until a restart; please report it.", error
            )


def build_engine(
    config: EngineConfig,
    on_progress: Callable[[str, int, int], None],
    on_grammar: Callable[[], None] = lambda: None,
) -> Engine:
    """Load the model, size the cache and wire the engine.

    Args:
        config: from the edge's settings.
        on_progress: called with the stage, and how much of it is done of how much in all.
        on_grammar: called from a thread when `Engine.take_grammars` has something to take.

    Raises:
        UnservableSettings, ModelError, BackendUnavailableError, NotEnoughMemory: for a person to read.
    """
    started = time.monotonic()
    if config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)
    device = _select_device(config.device)
    config = _fill_in_for(device, config)
    backend = select_backend(config.attention_backend, device, batch_invariant=config.batch_invariant)
    _refuse_cache_dtype(config.kv_cache_dtype, backend.name, device)
    ops = select_ops(backend.name, device, batch_invariant=config.batch_invariant)
    model = load_model(
        Path(config.model_path),
        _select_dtype(config, device),
        device,
        ops,
        lambda done, total: on_progress("weights", done, total),
    )
    spec = _kv_cache_spec(model, config)
    max_model_len = _max_model_len(model, config)
    batch_sizes = _graph_batch_sizes(config, device, backend)

    def run_largest_step() -> None:
        output = largest_step(config, max_model_len)
        kv_cache = KVCache(spec, sum(len(row.block_ids) for row in output.rows if isinstance(row, NewRow)), device)
        runner = ModelRunner(model, backend, kv_cache, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len)
        runner.execute(output)

    def card_bytes() -> int:
        for_graphs = graph_bytes(batch_sizes, model.config.vocab_size)
        return gpu_cache_bytes(device, config.gpu_memory_utilization, run_largest_step, for_graphs)

    num_blocks = _num_blocks(config, spec, max_model_len, device, card_bytes)
    # A sequence longer than the whole pool could never end: the limit that clients see says so from the start.
    max_model_len = min(max_model_len, num_blocks * config.block_size)
    scheduler = Scheduler(
        _scheduler_config(config, max_model_len, model.config.eos_token_ids),
        BlockManager(num_blocks, config.block_size),
    )
    kv_cache = KVCache(spec, num_blocks, device)
    graphs = _capture_graphs(model, backend, kv_cache, batch_sizes, max_model_len, on_progress)
    runner = ModelRunner(
        model,
        backend,
        kv_cache,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        graphs=graphs,
    )
    if device.type != "cpu":
        warm_up(runner, config, max_model_len)
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
    )
    grammars = GrammarCompilation(lambda: _load_vocabulary(config.model_path), info.vocab_size, on_grammar)
    return Engine(scheduler, runner, info, grammars=grammars, async_scheduling=bool(config.async_scheduling))


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


def _scheduler_config(config: EngineConfig, max_model_len: int, eos_token_ids: Iterable[int]) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(eos_token_ids),
        long_prefill_token_threshold=config.long_prefill_token_threshold,
    )


def _load_vocabulary(model_path: str) -> Vocabulary:
    """The tokens that grammars are followed with. Raises TokenizerError."""
    tokenizer = load_tokenizer(Path(model_path))
    return Vocabulary(
        [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)],
        tokenizer.special_token_ids,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


def _select_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UnservableSettings("--device cuda was asked for, and torch sees no CUDA device. Use --device cpu.")
    return torch.device(name)


def _fill_in_for(device: torch.device, config: EngineConfig) -> EngineConfig:
    """The settings that were left to the device."""
    is_cpu = device.type == "cpu"
    max_num_seqs, max_num_batched_tokens = (64, 512) if is_cpu else (256, 8192)
    return replace(
        config,
        max_num_seqs=config.max_num_seqs or max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or max_num_batched_tokens,
        # On a CPU the scheduler would compete with the step it runs beside for the same cores.
        async_scheduling=not is_cpu if config.async_scheduling is None else config.async_scheduling,
    )


def _select_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Half-precision products are slow on most processors and exactness is cheap there: float32 on the CPU."""
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def _refuse_cache_dtype(kv_cache_dtype: str, backend_name: str, device: torch.device) -> None:
    if kv_cache_dtype == "fp8" and device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if backend_name == "triton" and (major, minor) < (8, 9):
            raise UnservableSettings(
                f"--kv-cache-dtype fp8 needs a card of compute capability 8.9, and this one has {major}.{minor}: "
                "use int8, which takes as much memory."
            )
    if kv_cache_dtype in _CACHE_DTYPES and backend_name == "cpu":
        raise UnservableSettings(
            f"--kv-cache-dtype {kv_cache_dtype} needs --attention-backend torch (on a CPU) or a GPU: the native CPU "
            "kernels read no quantised cache."
        )


def _graph_batch_sizes(config: EngineConfig, device: torch.device, backend: AttentionBackend) -> list[int]:
    """None where steps are launched kernel by kernel."""
    if config.enforce_eager or device.type != "cuda" or backend.name != "triton":
        return []
    return graph_batch_sizes(config.max_num_seqs)


def _kv_cache_spec(model: Decoder, config: EngineConfig) -> KVCacheSpec:
    dtype = _CACHE_DTYPES.get(config.kv_cache_dtype, str(model.dtype).removeprefix("torch."))
    return KVCacheSpec(
        num_layers=len(model.config.layers),
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        block_size=config.block_size,
        dtype=dtype,
    )


def _max_model_len(model: Decoder, config: EngineConfig) -> int:
    longest = model.config.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise UnservableSettings(
            f"--max-model-len {config.max_model_len} is more than the {longest} positions this model was made for."
        )
    return config.max_model_len


def _num_blocks(
    config: EngineConfig,
    spec: KVCacheSpec,
    max_model_len: int,
    device: torch.device,
    card_bytes: Callable[[], int],
) -> int:
    if config.num_gpu_blocks_override:
        num_blocks = config.num_gpu_blocks_override
    else:
        if config.kv_cache_memory:
            num_bytes = config.kv_cache_memory
        elif device.type == "cpu":
            num_bytes = host_cache_bytes()
        else:
            num_bytes = card_bytes()
        most_useful = config.max_num_seqs * -(-max_model_len // spec.block_size)
        num_blocks = min(spec.num_blocks_in(num_bytes), most_useful)
        if num_blocks < 1:
            raise UnservableSettings(
                f"The KV cache may take {num_bytes} bytes, and one block of {spec.block_size} tokens needs "
                f"{spec.bytes_per_block}. Raise --kv-cache-memory or lower --block-size."
            )
    needed = num_blocks * spec.bytes_per_block
    if device.type == "cpu" and needed > (available := available_host_bytes()):
        raise UnservableSettings(
            f"{num_blocks} KV blocks need {needed / GIB:.1f} GiB, and {available / GIB:.1f} GiB of memory are free. "
            "Lower --kv-cache-memory or --num-gpu-blocks-override."
        )
    return num_blocks
