"""The bodies of `POST /v1/messages` and of its `count_tokens`, in Anthropic's shape.

Knows the shape of the API only: no template, no window, no engine.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from server.errors import InvalidRequest
from server.protocol.parts import Part, PartAt, TranslatedRequest
from server.protocol.tools import MAX_TOOLS

MAX_MESSAGES = 4096
MAX_BLOCKS = 256  # of one message
_MAX_INT = 2**63 - 1
_TYPES_OF_ROLE = {"user": ("text", "tool_result"), "assistant": ("text", "tool_use"), "system": ("text",)}
_REQUIRED_OF_TYPE = {"text": ("text",), "tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id",)}


def _as_blocks(value: object) -> object:
    """A string is short for one block of text."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextBlock(Part):
    """A piece of text."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {"citations": ([],)}
    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["text"]
    text: str


_TextList = Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS)]
_Texts = Annotated[_TextList, BeforeValidator(_as_blocks, json_schema_input_type=str | _TextList)]


class ContentBlock(Part):
    """A piece of a message: text, a call of a tool, or what the tool answered, each with fields of its own."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        "caller": ({"type": "direct"},),
        "citations": ([],),
        "toolset_name": (),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["text", "tool_use", "tool_result"]
    text: str | None = None
    id: str | None = Field(None, min_length=1, max_length=256)
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = Field(None, min_length=1, max_length=256)
    content: _Texts | None = None
    is_error: bool | None = None


_BlockList = Annotated[list[ContentBlock], Field(max_length=MAX_BLOCKS)]


class InputMessage(Part):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[_BlockList, BeforeValidator(_as_blocks, json_schema_input_type=str | _BlockList)]

    def check(self, path: str) -> None:
        """Each block has what its type needs, and stands where it may. Raises InvalidRequest."""
        for index, block in enumerate(self.content):
            at = f"{path}.content[{index}]"
            if block.type not in _TYPES_OF_ROLE[self.role]:
                raise InvalidRequest(
                    f"{at}.type is {block.type}, which the role {self.role} cannot have.", f"{at}.type"
                )
            for name in _REQUIRED_OF_TYPE[block.type]:
                if getattr(block, name) is None:
                    raise InvalidRequest(f"{at}.{name} is required.", f"{at}.{name}")

    def parts(self, path: str) -> Iterator[PartAt]:
        """The message and all that is in it."""
        yield path, self
        for index, block in enumerate(self.content):
            at = f"{path}.content[{index}]"
            yield at, block
            for position, text in enumerate(block.content or []):
                yield f"{at}.content[{position}]", text


class Tool(Part):
    """A function of the client that the model may call."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        "allowed_callers": (["direct"], []),
        "defer_loading": (False,),
        "eager_input_streaming": (True,),
        "input_examples": ([],),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Part):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Part):
    """Whether the model thinks before it answers. One that cannot, adapts by not thinking."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"display"})

    type: Literal["disabled", "adaptive"]


class OutputFormat(Part):
    """The JSON schema of the answer."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Part):
    """The form of the answer."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {"effort": ("high",), "task_budget": ()}

    format: OutputFormat | None = None


class ConversationFields(TranslatedRequest):
    """What makes the prompt: what `/v1/messages` and `count_tokens` share."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        "container": (),
        "context_management": (),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "output_format": (),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    messages: list[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: _Texts | None = Field(None, description="What the system says first.")
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, description="Functions of the client.")
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(None, description="disabled or adaptive, which mean the same here.")
    output_config: OutputConfig | None = Field(None, description="`format`: the JSON schema of the answer.")

    def refuse_unsupported(self) -> None:
        """Refuse what this server knows and cannot do, and what does not fit together. Raises InvalidRequest."""
        super().refuse_unsupported()
        for index, message in enumerate(self.messages):
            message.check(f"messages[{index}]")
        choice = self.tool_choice
        if choice is not None and (choice.type == "tool") != (choice.name is not None):
            raise InvalidRequest("tool_choice.name belongs to the type tool, and only to it.", "tool_choice.name")

    def parts(self) -> Iterator[PartAt]:
        """Every object in the body."""
        for index, message in enumerate(self.messages):
            yield from message.parts(f"messages[{index}]")
        for name, parts in (("system", self.system), ("tools", self.tools)):
            for index, part in enumerate(parts or []):
                yield f"{name}[{index}]", part
        for name, single in (("tool_choice", self.tool_choice), ("thinking", self.thinking)):
            if single is not None:
                yield name, single
        if self.output_config is not None:
            yield "output_config", self.output_config
            if self.output_config.format is not None:
                yield "output_config.format", self.output_config.format


class CountTokensRequest(ConversationFields):
    """How many tokens would a message's prompt have?"""


class MessagesRequest(ConversationFields):
    """A conversation to be continued, and how."""

    max_tokens: int = Field(
        ge=0,
        le=_MAX_INT,
        description="0: compute the prompt only. What the window has no room for ends the answer with "
        "model_context_window_exceeded.",
    )
    metadata: dict[str, Any] | None = Field(None, description="Labels, which change nothing.")
    stop_sequences: list[str] | None = Field(None, description="At most 16 of at most 1024 bytes.")
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2, description="0: the most likely token.")
    top_k: int | None = Field(None, ge=-1, le=_MAX_INT, description="-1 or 0: off.")
    top_p: float | None = Field(None, ge=0, le=1, description="0: the most likely token.")
