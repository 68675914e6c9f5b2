"""The bodies of `POST /v1/responses` and of its `input_tokens`, in OpenAI's shape.

Knows the shape of the API only: no template, no window, no engine. Nothing is stored, so a conversation comes whole.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from server.errors import InvalidRequest
from server.protocol.field_types import invalid
from server.protocol.fields import MAX_LABEL, MAX_LOGPROBS, MAX_METADATA
from server.protocol.parts import SAMPLING_FIELDS, Part, PartAt, TranslatedRequest
from server.protocol.tools import MAX_TOOLS

MAX_ITEMS = 4096
MAX_PARTS = 256  # of one item
_MAX_INT = 2**63 - 1
_MAX_KEY = 64
_MAX_VALUE = 512
LOGPROBS = "message.output_text.logprobs"
# There are no reasoning items, so there is nothing to include of them.
_INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
_REQUIRED_OF_TYPE = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "function": ("name",),
    "allowed_tools": ("mode", "tools"),
    "json_schema": ("name", "json_schema"),
}
_PARTS_OF_ROLE = {"assistant": ("input_text", "output_text", "refusal")}
_INPUT_PARTS = ("input_text",)


def _as_items(value: object) -> object:
    """A string is short for one message of the user."""
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


def _as_item_type(value: object) -> object:
    """Null is as good as no type."""
    return "message" if value is None else value


def _as_parts(value: object) -> object:
    """A string is short for one part of text."""
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class TextPart(Part):
    """A piece of what was said."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {"annotations": ([],)}
    without_effect: ClassVar[frozenset[str]] = frozenset({"logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @property
    def said(self) -> str:
        """The text, whatever kind it is of."""
        return (self.refusal if self.type == "refusal" else self.text) or ""


_PartList = Annotated[list[TextPart], Field(max_length=MAX_PARTS)]
_Parts = Annotated[_PartList, BeforeValidator(_as_parts, json_schema_input_type=str | _PartList)]


class InputItem(Part):
    """A turn of the conversation: a message, a function that the model called, or what the function answered."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {"caller": ({"type": "direct"},), "namespace": ()}
    without_effect: ClassVar[frozenset[str]] = frozenset({"id", "phase", "status"})

    type: Annotated[Literal["message", "function_call", "function_call_output"], BeforeValidator(_as_item_type)] = (
        "message"
    )
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: _Parts | None = None
    call_id: str | None = Field(None, min_length=1, max_length=256)
    name: str | None = None
    arguments: str | None = None
    output: _Parts | None = None

    def check(self, path: str) -> None:
        """The item has what its type needs. Raises InvalidRequest."""
        for name in _REQUIRED_OF_TYPE[self.type]:
            if getattr(self, name) is None:
                raise InvalidRequest(f"{path}.{name} is required.", f"{path}.{name}")
        for name, parts in (("content", self.content), ("output", self.output)):
            for index, part in enumerate(parts or []):
                at = f"{path}.{name}[{index}]"
                if part.type not in _PARTS_OF_ROLE.get(self.role or "", _INPUT_PARTS):
                    raise InvalidRequest(f"{at}.type must be 'input_text' here, not {part.type!r}.", f"{at}.type")
                field = "refusal" if part.type == "refusal" else "text"
                if getattr(part, field) is None:
                    raise InvalidRequest(f"{at}.{field} is required.", f"{at}.{field}")

    def parts(self, path: str) -> Iterator[PartAt]:
        """The item and all that is in it."""
        yield path, self
        for name, parts in (("content", self.content), ("output", self.output)):
            for index, part in enumerate(parts or []):
                yield f"{path}.{name}[{index}]", part


_ItemList = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS)]


class FunctionTool(Part):
    """A function of the client that the model may call."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        "allowed_callers": (["direct"], []),
        "async": (False,),
        "defer_loading": (False,),
        "output_schema": (),
    }

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedTool(Part):
    """The name of one of the tools."""

    type: Literal["function"]
    name: str


class ToolChoice(Part):
    """Whether functions may or must be called, and which. A mode stands for an object that has no other field."""

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = Field(None, min_length=1, max_length=MAX_TOOLS)


_ToolMode = Literal["none", "auto", "required"]


def _as_tool_choice(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


class TextFormat(Part):
    """The form of the answer."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"description"})

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Part):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Part):
    """How the model thinks before it answers. What is not thought has no summary, however long one is asked for."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {"mode": ("auto", "standard")}

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None


class StreamOptions(Part):
    """What the stream carries besides the answer."""

    include_obfuscation: bool | None = Field(
        None, description="Fill events up with random characters, so that their sizes tell less of the text."
    )


class InputFields(TranslatedRequest):
    """What makes the prompt: what `/v1/responses` and `input_tokens` share."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        "conversation": (),
        "personality": (),
        "previous_response_id": (),
        "truncation": ("disabled",),
    }

    input: Annotated[_ItemList, BeforeValidator(_as_items, json_schema_input_type=str | _ItemList)]
    instructions: str | None = Field(None, description="What the system says first.")
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    tool_choice: Annotated[
        ToolChoice | None, BeforeValidator(_as_tool_choice, json_schema_input_type=_ToolMode | ToolChoice | None)
    ] = None
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)

    def refuse_unsupported(self) -> None:
        """Refuse what this server knows and cannot do, and what does not fit together. Raises InvalidRequest."""
        super().refuse_unsupported()
        for index, item in enumerate(self.input):
            item.check(f"input[{index}]")
        for path, part in (("tool_choice", self.tool_choice), ("text.format", self.text and self.text.format)):
            for name in () if part is None else _REQUIRED_OF_TYPE.get(part.type, ()):
                if getattr(part, name) is None:
                    shown = f"{path}.{'schema' if name == 'json_schema' else name}"
                    raise InvalidRequest(f"{shown} is required.", shown)

    def parts(self) -> Iterator[PartAt]:
        """Every object in the body."""
        for index, item in enumerate(self.input):
            yield from item.parts(f"input[{index}]")
        for index, tool in enumerate(self.tools or []):
            yield f"tools[{index}]", tool
        for name, part in (("reasoning", self.reasoning), ("text", self.text)):
            if part is not None:
                yield name, part
        if self.text is not None and self.text.format is not None:
            yield "text.format", self.text.format
        if self.tool_choice is not None:
            yield "tool_choice", self.tool_choice
            for index, allowed in enumerate(self.tool_choice.tools or []):
                yield f"tool_choice.tools[{index}]", allowed


class InputTokensRequest(InputFields):
    """How many tokens would a response's prompt have?"""


def _check_metadata(value: object) -> object:
    if isinstance(value, dict) and any(
        len(key) > _MAX_KEY or (isinstance(text, str) and len(text) > _MAX_VALUE) for key, text in value.items()
    ):
        raise invalid(f"a key of metadata may have {_MAX_KEY} characters, a value {_MAX_VALUE}")
    return value


def _check_include(value: object) -> object:
    unknown = [name for name in value if name not in _INCLUDABLE] if isinstance(value, list) else []
    if unknown:
        raise invalid(f"include may only hold {' and '.join(_INCLUDABLE)}")
    return value


class ResponsesRequest(InputFields):
    """A conversation to be continued, and how."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        **InputFields.neutral,
        "background": (False,),
        "context_management": ([],),
        "moderation": (),
        "prompt": (),
        "prompt_cache_options": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
    }
    borrowed: ClassVar[frozenset[str]] = SAMPLING_FIELDS | {"stop"}

    include: Annotated[list[str] | None, BeforeValidator(_check_include)] = Field(None, max_length=16)
    max_output_tokens: int | None = Field(None, ge=1, le=_MAX_INT)
    max_tool_calls: int | None = Field(None, ge=1, le=_MAX_INT, description="Of tools of the server: there are none.")
    metadata: Annotated[dict[str, str] | None, Field(max_length=MAX_METADATA), BeforeValidator(_check_metadata)] = None
    prompt_cache_key: str | None = Field(None, max_length=MAX_LABEL)
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None
    safety_identifier: str | None = Field(None, max_length=MAX_LABEL)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2, description="0: the most likely token.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    top_p: float | None = Field(None, ge=0, le=1, description="0: the most likely token.")
    user: str | None = Field(None, max_length=MAX_LABEL)

    @property
    def wants_logprobs(self) -> bool:
        """The answer shall carry log-probabilities."""
        return LOGPROBS in (self.include or [])

    def refuse_unsupported(self) -> None:
        """Refuse what this server knows and cannot do, and what does not fit together. Raises InvalidRequest."""
        super().refuse_unsupported()
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidRequest(f"top_logprobs needs include to hold {LOGPROBS}.", "top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true.", "stream_options")

    def parts(self) -> Iterator[PartAt]:
        """Every object in the body."""
        yield from super().parts()
        if self.stream_options is not None:
            yield "stream_options", self.stream_options
