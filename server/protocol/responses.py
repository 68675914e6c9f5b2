"""The bodies of answers, whole and as chunks of a stream, in OpenAI's shapes. Plain structs: they only get encoded."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length"]


class Usage(msgspec.Struct, frozen=True):
    """Counts of tokens; the prompt counts once, however many answers were made of it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Four arrays with one element per token."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null for a prompt's first token: nothing comes before it
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # where the token's text begins in the choice's text, in code points


class CompletionChoice(msgspec.Struct, frozen=True):
    """One text, or the next piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in a stream: with the first piece


class Completion(msgspec.Struct, frozen=True):
    """The answer of `/v1/completions`, and each chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice] | list[msgspec.Raw]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET


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


class ChatMessage(msgspec.Struct, frozen=True):
    """A whole answer, or in a stream the next piece of it."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """The answer of `/v1/chat/completions`."""

    id: str
    created: int
    model: str
    choices: list[msgspec.Raw]  # each a ChatChoice
    usage: Usage
    object: str = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """The next piece of one answer."""

    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, frozen=True):
    """One event of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first piece of each answer


def to_json(body: Any) -> bytes:  # noqa: ANN401
    """Encode a body."""
    return msgspec.json.encode(body)


def to_raw(part: msgspec.Struct) -> msgspec.Raw:
    """Encode a part of a body by itself: other threads run between two parts, and stand still while one is encoded."""
    return msgspec.Raw(msgspec.json.encode(part))
