"""The answers of `GET /v1/requests/{id}`. Plain structs: they show no prompt, no answer and no other key's requests."""

import msgspec

from scheduler.output import DropCause, FinishReason
from scheduler.request_report import PreemptionCause, RequestState, WaitReason


class PreemptionDetails(msgspec.Struct, frozen=True):
    """One time that a sequence lost its KV blocks to another."""

    time: float  # seconds since the epoch
    index: int  # of the sequence
    cause: PreemptionCause
    by: str | None  # the answer that it made way for; None: that of another key
    num_lost_tokens: int  # computed tokens that were thrown away
    swapped: bool  # its blocks were kept in host memory, and nothing was thrown away


class SequenceDetails(msgspec.Struct, frozen=True):
    """One of the answers to a prompt."""

    index: int
    state: RequestState
    finish_reason: FinishReason | None  # the engine's: one that met a stop string was aborted
    num_tokens: int  # prompt and answer
    num_computed_tokens: int
    num_recomputed_tokens: int
    num_blocks: int
    block_table: list[int]  # KV blocks in the order of the tokens; the first 1024
    num_swapped_blocks: int  # in host memory


class PromptDetails(msgspec.Struct, frozen=True):
    """One prompt on its way through the engine. Durations in seconds, times in seconds since the epoch."""

    index: int
    state: RequestState | None  # None: the engine has not got it, did not take it, or was lost
    explanation: list[str]  # the same in sentences
    priority: int = 0
    wait_reason: WaitReason | None = None  # why it waits at this moment
    wait_seconds: dict[WaitReason, float] = {}
    queue_seconds: float | None = None  # until it was admitted for the first time
    prefill_seconds: float | None = None  # from then to the first token
    decode_seconds: float | None = None  # from the first token to the end
    admitted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int = 0
    first_difference: int | None = None  # position of the first prompt token that differs from what was cached
    num_generated_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    preemptions: list[PreemptionDetails] = []  # the first 32
    sequences: list[SequenceDetails] = []  # the first 32
    drop_cause: DropCause | None = None


class RequestDetails(msgspec.Struct, frozen=True):
    """What happened to a request."""

    id: str  # of its answer
    request_id: str  # of the header x-request-id
    model: str
    endpoint: str
    key: str | None  # the name of the key that it came with
    created: float
    ended: float | None
    status: int | None  # of the HTTP answer; 499: the caller went away; None: it is not sent yet
    finish_reasons: dict[FinishReason, int]  # as the caller saw them
    num_prompts: int
    prompts: list[PromptDetails]  # the first 64
    block_size: int | None = None  # tokens of a KV block; None: the engine is lost or loading
    object: str = "request"
