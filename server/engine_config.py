"""What of the settings goes to the engine process. Knows neither where they come from nor what they lead to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine process needs to know. Plain values: it crosses to that process as msgpack."""

    model_path: str
    dtype: str
    device: str
    attention_backend: str
    block_size: int  # tokens
    num_gpu_blocks_override: int | None
    kv_cache_memory: int | None  # bytes
    gpu_memory_utilization: float  # 0 to 1
    max_model_len: int | None  # tokens; None = the model's own
    max_num_seqs: int | None  # None = what suits the device
    max_num_batched_tokens: int | None  # None = what suits the device
    long_prefill_token_threshold: int | None  # tokens; 0 = no cap, None = a quarter of a step
    cpu_threads: int | None  # None = the machine's physical cores
    kv_cache_dtype: str  # "auto" = that of the model, or bfloat16 beside quantised weights
    batch_invariant: bool
    async_scheduling: bool | None  # None = on a GPU only
    enforce_eager: bool
    quantization: str = "none"  # "auto" = what is fastest on the device
    home: str | None = None  # the cache folder; None = nothing is kept between starts
    log_level: str = "info"
    log_format: str = "human"  # or json
    enable_prefix_caching: bool = True
    swap_space: int | None = None  # bytes of host memory for the blocks of preempted sequences; None = see Settings
    max_num_queued_reqs: int = 0  # requests that wait; 0 = no limit
    max_num_queued_tokens: int = 0  # tokens of their prompts; 0 = no limit
    priority_ageing: float = 0.0  # seconds; 0 = never
