"""The answers of `/v1/responses`, whole and as the events of a stream, in OpenAI's shapes. They only get encoded."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.protocol.responses import ChatTokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """What the model says."""

    text: str
    logprobs: list[ChatTokenLogprob]
    annotations: tuple[()] = ()


class OutputMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class FunctionCall(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A function that the model wants called."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | FunctionCall


class InputTokensDetails(msgspec.Struct, frozen=True):
    """How many of the prompt's tokens were found in the cache. Nothing is written to it on request."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """No token is spent on thoughts that are not shown."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed."""

    message: str
    code: Literal["server_error", "invalid_prompt"] = "server_error"


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Response(msgspec.Struct, frozen=True):
    """The answer of `/v1/responses`: what was asked, as it was understood, and what came of it."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[OutputItem]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    user: str | None
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    background: bool = False
    object: str = "response"
    previous_response_id: None = None
    service_tier: str = "default"
    store: bool = False  # whatever the default elsewhere: nothing is kept
    truncation: str = "disabled"


class InputTokenCount(msgspec.Struct, frozen=True):
    """The answer of `/v1/responses/input_tokens`."""

    input_tokens: int
    object: str = "response.input_tokens"


class StreamEvent(msgspec.Struct, frozen=True, tag_field="type"):
    """One event of a stream; they are numbered from 0."""

    sequence_number: int


class ResponseCreated(StreamEvent, frozen=True, tag="response.created"):
    """The first event."""

    response: Response


class ResponseInProgress(StreamEvent, frozen=True, tag="response.in_progress"):
    """The second event."""

    response: Response


class ResponseCompleted(StreamEvent, frozen=True, tag="response.completed"):
    """The last event of an answer that came to its end."""

    response: Response


class ResponseIncomplete(StreamEvent, frozen=True, tag="response.incomplete"):
    """The last event of an answer that was cut off."""

    response: Response


class ResponseFailed(StreamEvent, frozen=True, tag="response.failed"):
    """The last event of an answer that could not go on."""

    response: Response


class OutputItemAdded(StreamEvent, frozen=True, tag="response.output_item.added"):
    """An item begins, without its content."""

    output_index: int
    item: OutputItem


class OutputItemDone(StreamEvent, frozen=True, tag="response.output_item.done"):
    """An item is complete."""

    output_index: int
    item: OutputItem


class ContentPartAdded(StreamEvent, frozen=True, tag="response.content_part.added"):
    """The text of a message begins."""

    item_id: str
    output_index: int
    part: OutputText
    content_index: int = 0


class ContentPartDone(StreamEvent, frozen=True, tag="response.content_part.done"):
    """The text of a message is complete."""

    item_id: str
    output_index: int
    part: OutputText
    content_index: int = 0


class OutputTextDelta(StreamEvent, frozen=True, tag="response.output_text.delta"):
    """The next piece of a text."""

    item_id: str
    output_index: int
    delta: str
    logprobs: list[ChatTokenLogprob]
    content_index: int = 0
    obfuscation: str | UnsetType = UNSET


class OutputTextDone(StreamEvent, frozen=True, tag="response.output_text.done"):
    """The whole of a text."""

    item_id: str
    output_index: int
    text: str
    logprobs: list[ChatTokenLogprob]
    content_index: int = 0


class FunctionCallArgumentsDelta(StreamEvent, frozen=True, tag="response.function_call_arguments.delta"):
    """The next piece of the arguments of a function."""

    item_id: str
    output_index: int
    delta: str
    obfuscation: str | UnsetType = UNSET


class FunctionCallArgumentsDone(StreamEvent, frozen=True, tag="response.function_call_arguments.done"):
    """The whole of the arguments of a function."""

    item_id: str
    output_index: int
    name: str
    arguments: str


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | OutputItemAdded
    | ContentPartAdded
    | OutputTextDelta
    | OutputTextDone
    | ContentPartDone
    | FunctionCallArgumentsDelta
    | FunctionCallArgumentsDone
    | OutputItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
)
