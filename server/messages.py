"""What the edge and the engine process say to each other, as msgpack. Knows neither how they are sent nor HTTP."""

import msgspec

from scheduler.output import DropCause, SequenceUpdate
from scheduler.pool_report import PoolReport
from scheduler.request_report import RequestReport
from scheduler.sampling_params import SamplingParams
from scheduler.stats import SchedulerStats
from server.step_clock import StepPart
from server.token_ids import TokenIds


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Edge to engine: a validated, tokenised request."""

    request_id: str
    prompt_token_ids: TokenIds
    params: SamplingParams
    arrival_time: float  # seconds since the epoch
    priority: int = 0  # a lower one is served first
    tenant: str = ""  # the name of the authenticated key; "" where there are no keys
    cache_salt: str = ""  # narrows whose cached blocks it shares, beyond its tenant
    reuses_cache: bool = True  # may begin with blocks that are cached
    queue_deadline: float | None = None  # seconds since the epoch by which it must have been admitted
    deadline: float | None = None  # by which its answer must be complete


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Edge to engine: end a request, or one of its sequences; nothing more is sent about it."""

    request_id: str
    index: int | None = None  # None = all of them


class Inspect(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Edge to engine: what has happened to these requests so far? Answered between two steps."""

    number: int  # of the question
    request_ids: list[str]


class InspectPool(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Edge to engine: who holds which blocks? Answered between two steps."""

    number: int  # of the question; Inspect's are counted with them


class EngineInfo(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine to edge, once, when it is ready to serve."""

    max_model_len: int  # the model's or the setting's limit, capped by what an empty pool holds
    num_blocks: int
    block_size: int
    vocab_size: int
    attention_backend: str
    device: str
    dtype: str  # of the KV cache
    load_seconds: float
    kv_cache_bytes: int
    hidden_size: int = 0  # of an embedding
    enable_prefix_caching: bool = False
    quantization: str = "none"  # of the weights
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    async_scheduling: bool = False


class LoadProgress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine to edge while loading."""

    stage: str  # for a person: "weights", "KV cache", ...
    done: int
    total: int


class EngineFailure(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine to edge: it cannot start with this model and these settings. The process exits after it."""

    message: str


class Rejected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine to edge: this request was refused at the scheduler's door."""

    request_id: str
    message: str
    param: str | None = None
    is_shortage: bool = False  # nothing is wrong with it: sent again later, it may be taken
    cause: DropCause | None = None  # of a shortage in the scheduler
    retry_after: float | None = None  # seconds after which there should be room, by measured throughput


class EngineStats(SchedulerStats, frozen=True, array_like=True):
    """Counters and gauges since the engine's start; the edge turns them into metrics."""

    num_integrity_failures: int = 0  # idle checks of the block pool that found it not whole
    queue_seconds: float | None = None  # for what waits, by the speed of the last steps; None = nothing was timed yet
    step_seconds: dict[StepPart, float] = msgspec.field(default_factory=dict)  # since the start
    step_token_counts: tuple[int, ...] = ()  # steps by how many tokens they computed, see STEP_TOKEN_BOUNDS
    num_step_tokens: int = 0  # of all steps


class StepUpdates(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine to edge: after a step, or on its own once a second as a sign of life."""

    updates: list[SequenceUpdate]
    stats: EngineStats | None  # None: as they were, or nearly
    reports: list[RequestReport] = []  # of requests that have ended, in whatever way


class Inspection(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine to edge: the answer to Inspect."""

    number: int  # of the question
    reports: list[RequestReport]  # of those requests that are in the engine


class PoolInspection(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine to edge: the answer to InspectPool."""

    number: int  # of the question
    report: PoolReport
    seconds: float  # that the engine took for it


EdgeMessage = Submit | Abort | Inspect | InspectPool
EngineMessage = EngineInfo | LoadProgress | EngineFailure | Rejected | StepUpdates | Inspection | PoolInspection
