"""The bodies of answers, whole and as chunks of a stream, in OpenAI's shapes. Plain structs: they only get encoded."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Part of the prompt's tokens."""

    cached_tokens: int  # not computed, since their KV blocks were there
    audio_tokens: int = 0
    truncated_tokens: int | UnsetType = UNSET  # none of the prompt's: those that were cut off it, as asked


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Part of the generated tokens."""

    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Counts of tokens; the prompt counts once, however many answers were made of it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    recomputed_tokens: int | UnsetType = UNSET  # computed again after preemption, if any


class Timings(msgspec.Struct, frozen=True):
    """How long the tokens took, in the form of llama.cpp's server. Null where there were none."""

    cache_n: int
    prompt_n: int  # computed: without those from the cache
    prompt_ms: float  # from the request's arrival to the first token: with its wait for other requests
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float  # from the first token to the last
    predicted_per_token_ms: float | None
    predicted_per_second: float | None


class PromptLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token that stands, or could have stood, at a place of the prompt: vLLM's form."""

    logprob: float
    rank: int | None  # 1: the likeliest; null: beyond those that are listed
    decoded_token: str


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Five arrays with one element per token."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null for a prompt's first token: nothing comes before it
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # where the token's text begins in the choice's text, in code points
    bytes: list[tuple[int, ...]]  # joined, they are the text, however tokens cut its characters


class CompletionChoice(msgspec.Struct, frozen=True):
    """One text, or the next piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET  # with the end: the caller's stop string or token that made it
    prompt_logprobs: msgspec.Raw | UnsetType = UNSET  # list[dict[token id, PromptLogprob] | None]
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in a stream: with the first piece


class Completion(msgspec.Struct, frozen=True):
    """The answer of `/v1/completions`, and each chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice] | list[msgspec.Raw]
    object: str = "text_completion"
    system_fingerprint: str | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET  # random characters, where asked for


class ChatLogprob(msgspec.Struct, frozen=True, gc=False):  # no cycles, and there may be millions
    """A token that could have come, and how likely it was."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChatTokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token that came, and the likeliest ones at its place."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: list[ChatLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """One element per token of the content."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatFunction(msgspec.Struct, frozen=True):
    """What is called; in a stream the name comes first, then the arguments piece by piece."""

    arguments: str  # JSON
    name: str | UnsetType = UNSET


class ChatToolCall(msgspec.Struct, frozen=True):
    """A call of a function, or in a stream the next piece of it."""

    function: ChatFunction
    index: int | UnsetType = UNSET  # in a stream
    id: str | UnsetType = UNSET  # with the first piece
    type: Literal["function"] | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True):
    """A whole answer, or in a stream the next piece of it."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET  # as in a CompletionChoice
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """The answer of `/v1/chat/completions`."""

    id: str
    created: int
    model: str
    choices: list[msgspec.Raw]  # each a ChatChoice
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: str | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_logprobs: msgspec.Raw | UnsetType = UNSET  # as in a CompletionChoice
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """The next piece of one answer."""

    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET  # as in a CompletionChoice
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, frozen=True):
    """One event of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    system_fingerprint: str | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first piece of each answer
    obfuscation: str | UnsetType = UNSET  # random characters, where asked for


def to_json(body: Any) -> bytes:  # noqa: ANN401
    """Encode a body."""
    return msgspec.json.encode(body)


def to_raw(part: msgspec.Struct) -> msgspec.Raw:
    """Encode a part of a body by itself: other threads run between two parts, and stand still while one is encoded."""
    return msgspec.Raw(msgspec.json.encode(part))
