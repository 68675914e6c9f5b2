"""The answers of `/v1/messages`, whole and as the events of a stream, and its errors, in Anthropic's shapes.

Plain structs: they only get encoded. Knows no HTTP library.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.errors import ApiError, ServiceUnavailable

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
MESSAGES_PATH = "/v1/messages"
OVERLOADED = 529  # the status of a server that takes no requests for a while
_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """What the model says."""

    text: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A tool that the model wants used."""

    id: str
    name: str
    input: msgspec.Raw  # a JSON object


ContentBlock = TextBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True):
    """Counts of tokens. The prompt's are those that were computed and those that were read from the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0  # nothing is cached on request; what is computed may be found again
    service_tier: Literal["standard"] | UnsetType = UNSET


class Message(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """The answer of `/v1/messages`."""

    id: str
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct, frozen=True):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    """The first event: a message without content."""

    message: Message


class ContentBlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    """A block begins, without its text or its input."""

    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    """The next piece of a text."""

    text: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """The next piece of the JSON text of a tool's input."""

    partial_json: str


class ContentBlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    """The next piece of a block."""

    index: int
    delta: TextDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    """A block is complete."""

    index: int


class MessageChanges(msgspec.Struct, frozen=True):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    """What the end of the message brings."""

    delta: MessageChanges
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    """The last event."""


MessageEvent = MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop


def is_messages_path(path: str) -> bool:
    """A path of this API, after the prefix of a proxy if there is one."""
    return f"{MESSAGES_PATH}/" in f"{path}/"


def error_status(error: ApiError) -> int:
    """The status of an error, where this API has a number of its own."""
    return OVERLOADED if isinstance(error, ServiceUnavailable) else error.status


def error_body(error: ApiError) -> dict[str, Any]:
    """The body of an error, and the data of the event for one. There is no field for the name of what is at fault."""
    status = error_status(error)
    kind = _TYPE_OF_STATUS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = error.message
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}
