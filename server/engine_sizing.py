"""What the settings come to on this device and for this model: types, limits, the number of KV blocks.

Builds nothing and runs nothing; refuses what cannot be served in words for the person who set it.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from kernels.attention.backend import AttentionBackend
from models.cuda_graphs import graph_batch_sizes
from models.decoder import Decoder
from models.memory import GIB, available_host_bytes, host_cache_bytes
from models.quantization import Quantization
from paged_cache.spec import KVCacheSpec
from scheduler.config import SchedulerConfig
from server.engine_config import EngineConfig
from server.preemption_costs import PreemptionCosts

_CACHE_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8", "fp8": "float8_e4m3fn"}


class UnservableSettings(RuntimeError):
    """The engine cannot serve with these settings; the message is for the person who set them."""


def select_device(name: str) -> torch.device:
    """The device of this name; "auto" is the GPU where there is one. Raises UnservableSettings."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UnservableSettings("--device cuda was asked for, and torch sees no CUDA device. Use --device cpu.")
    return torch.device(name)


def fill_in_for(device: torch.device, config: EngineConfig) -> EngineConfig:
    """The settings that were left to the device."""
    is_cpu = device.type == "cpu"
    max_num_seqs, max_num_batched_tokens = (64, 512) if is_cpu else (256, 8192)
    max_num_batched_tokens = config.max_num_batched_tokens or max_num_batched_tokens
    threshold = config.long_prefill_token_threshold
    return replace(
        config,
        max_num_seqs=config.max_num_seqs or max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_token_threshold=max(1, max_num_batched_tokens // 4) if threshold is None else threshold,
        # On a CPU, host blocks would take the same memory as the cache itself.
        swap_space=(0 if is_cpu else _default_swap_space()) if config.swap_space is None else config.swap_space,
        # On a CPU the scheduler would compete with the step it runs beside for the same cores.
        async_scheduling=not is_cpu if config.async_scheduling is None else config.async_scheduling,
    )


def _default_swap_space() -> int:
    """Bytes beside a card: 4 GiB, or a quarter of what is free if that is less."""
    return min(4 * GIB, available_host_bytes() // 4)


def select_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Half-precision products are slow on most processors and exactness is cheap there: float32 on the CPU."""
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def select_quantization(config: EngineConfig, backend_name: str) -> Quantization:
    """What the weights are rounded to; only the native CPU kernels read codes, from float32 inputs.

    A --dtype that was set is taken at its word: weights of that type. Raises UnservableSettings.
    """
    is_gguf = Path(config.model_path).suffix.lower() == ".gguf"
    if config.quantization == "auto":
        return "none" if backend_name != "cpu" or config.dtype != "auto" else "gguf" if is_gguf else "int8"
    if config.quantization == "none":
        return "none"
    if backend_name != "cpu":
        raise UnservableSettings(
            f"--quantization {config.quantization} needs the native CPU kernels, and attention runs on {backend_name} "
            "here: use --quantization none."
        )
    if config.dtype not in ("auto", "float32"):
        raise UnservableSettings(
            f"--quantization {config.quantization} computes in float32: leave out --dtype {config.dtype}, or use "
            "--quantization none."
        )
    if config.quantization == "gguf" and not is_gguf:
        raise UnservableSettings(
            f"--quantization gguf keeps the blocks of a .gguf file, and {config.model_path} is none: use int8."
        )
    return "int8" if config.quantization == "int8" else "gguf"


def refuse_cache_dtype(kv_cache_dtype: str, backend_name: str, device: torch.device) -> None:
    """Raises UnservableSettings for a type that the kernels of this backend cannot read on this device."""
    if kv_cache_dtype == "fp8" and device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if backend_name == "triton" and (major, minor) < (8, 9):
            raise UnservableSettings(
                f"--kv-cache-dtype fp8 needs a card of compute capability 8.9, and this one has {major}.{minor}: "
                "use int8, which takes as much memory."
            )


def sizes_of_graphs(config: EngineConfig, device: torch.device, backend: AttentionBackend) -> list[int]:
    """The batch sizes that CUDA graphs are captured for; none where steps are launched kernel by kernel."""
    if config.enforce_eager or device.type != "cuda" or backend.name != "triton":
        return []
    return graph_batch_sizes(config.max_num_seqs)


def kv_cache_spec(model: Decoder, config: EngineConfig, quantization: Quantization) -> KVCacheSpec:
    """The shape of a block for this model, in the model's own type unless the settings name another.

    Beside weights that are rounded more than it, a cache of half the bytes costs no quality and reads twice as fast.
    """
    own = str(model.dtype).removeprefix("torch.") if quantization == "none" else "bfloat16"
    dtype = _CACHE_DTYPES.get(config.kv_cache_dtype, own)
    return KVCacheSpec(
        num_layers=len(model.config.layers),
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        block_size=config.block_size,
        dtype=dtype,
    )


def max_model_len_of(model: Decoder, config: EngineConfig) -> int:
    """The most tokens of a sequence. Raises UnservableSettings for more than the model was made for."""
    longest = model.config.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise UnservableSettings(
            f"--max-model-len {config.max_model_len} is more than the {longest} positions this model was made for."
        )
    return config.max_model_len


def num_kv_blocks(
    config: EngineConfig,
    spec: KVCacheSpec,
    max_model_len: int,
    device: torch.device,
    card_bytes: Callable[[], int],
) -> int:
    """The number of KV blocks on the device.

    Args:
        config: with the limits filled in.
        spec: of a block.
        max_model_len: in tokens.
        device: where the cache will lie.
        card_bytes: measures how many bytes of the card are left for the cache; called where nothing else says.

    Raises:
        UnservableSettings: where not one block fits, or more are asked for than fit.
    """
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


def scheduler_config(
    config: EngineConfig, max_model_len: int, eos_token_ids: Iterable[int], costs: PreemptionCosts
) -> SchedulerConfig:
    """The scheduler's part of the settings, and what preemption was measured to cost."""
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(eos_token_ids),
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_queued_requests=config.max_num_queued_reqs,
        max_queued_tokens=config.max_num_queued_tokens,
        ageing_seconds=config.priority_ageing,
        recompute_seconds_per_token=costs.recompute_seconds_per_token,
        swap_seconds_per_block=costs.swap_seconds_per_block,
    )


def num_host_kv_blocks(config: EngineConfig, spec: KVCacheSpec) -> int:
    """The number of KV blocks in host memory that preempted sequences are swapped out to.

    Raises:
        UnservableSettings: where they do not fit, or not one fits the space that was set.
    """
    assert config.swap_space is not None, "what is left to the device has been filled in"
    num_blocks = spec.num_blocks_in(config.swap_space)
    if config.swap_space and not num_blocks:
        raise UnservableSettings(
            f"--swap-space takes {config.swap_space} bytes, and one block of {spec.block_size} tokens needs "
            f"{spec.bytes_per_block}. Write 4GiB, or 4, for so many GiB; 0 lets preempted sequences be computed again."
        )
    needed = num_blocks * spec.bytes_per_block
    if needed > (available := available_host_bytes()):
        raise UnservableSettings(
            f"--swap-space takes {needed / GIB:.1f} GiB, and {available / GIB:.1f} GiB of memory are free. Lower it; "
            "0 lets preempted sequences be computed again."
        )
    return num_blocks
