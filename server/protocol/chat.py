"""The body of `POST /v1/chat/completions`. Knows the shape of the API only: no template, no window, no engine."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from server.errors import InvalidRequest
from server.protocol.field_types import invalid
from server.protocol.fields import MAX_LOGPROBS, GenerationFields, bounded_names, refuse_non_neutral
from server.protocol.tools import (
    MAX_CALL_ID,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    MessageToolCall,
    Tool,
    ToolChoice,
    ToolChoiceField,
)

MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 256
MAX_DOCUMENTS = 1024
MAX_TEMPLATE_VARIABLES = 64
_PART_FIELDS = ("type", "text", "prompt_cache_breakpoint")  # the last one is a hint for hosted caches


def _check_content(content: object) -> object:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid("content must be a string or a list of text parts")
    if len(content) > MAX_CONTENT_PARTS:
        raise invalid(f"content may hold at most {MAX_CONTENT_PARTS} parts, not {len(content)}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(
                'content may only hold parts of the form {"type": "text", "text": "..."}: no images, no audio'
            )
    return content


class ChatMessage(BaseModel):
    """One turn of the conversation."""

    model_config = ConfigDict(strict=True, extra="allow")
    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        "audio": (),
        "function_call": (),
        "refusal": (),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[dict[str, Any]] | None, BeforeValidator(_check_content)] = None
    name: str | None = None
    reasoning_content: str | None = Field(None, description="What the model thought; templates know where it belongs.")
    tool_calls: list[MessageToolCall] | None = Field(None, max_length=MAX_TOOL_CALLS)
    tool_call_id: str | None = Field(None, max_length=MAX_CALL_ID)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it, which know no developer."""
        content = self.content or ""
        if isinstance(content, list):
            content = [{"type": "text", "text": part["text"]} for part in content]
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message

    def check(self, path: str) -> None:
        """Refuse what does not fit the role. Raises InvalidRequest."""
        refuse_non_neutral(self, self.neutral, f"{path}.")
        if self.content is None and self.role != "assistant":
            raise InvalidRequest(f"{path}.content is required for the role {self.role}.", f"{path}.content")
        for name, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                raise InvalidRequest(f"{path}.{name} belongs to the role {role}, not {self.role}.", f"{path}.{name}")
        if self.role == "tool" and not self.tool_call_id:
            raise InvalidRequest(f"{path}.tool_call_id is required for the role tool.", f"{path}.tool_call_id")

    def ignored_fields(self) -> list[str]:
        """Names of the fields that nobody knows, of the message and of its parts."""
        names = [name for name in self.model_extra or {} if name not in self.neutral]
        if isinstance(self.content, list):
            for index, part in enumerate(self.content):
                names += [f"content[{index}].{name}" for name in part if name not in _PART_FIELDS]
        for index, call in enumerate(self.tool_calls or []):
            names += [f"tool_calls[{index}].{name}" for name in call.ignored_fields()]
        return names


class ChatCompletionRequest(GenerationFields):
    """A conversation to be continued, and how."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        **GenerationFields.neutral,
        "audio": (),
        "chat_template": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "include_reasoning": (True,),
        "mm_processor_kwargs": (),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "prompt_cache_options": (),
        "store": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    # Functions
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most.")

    # How the conversation is written out
    documents: list[dict[str, Any]] | None = Field(None, max_length=MAX_DOCUMENTS, description="If the template can.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=MAX_TEMPLATE_VARIABLES, description="Variables of the model's template."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="A variable of some templates."
    )
    add_generation_prompt: bool | None = Field(None, description="Begin the assistant's turn. Absent: true.")
    continue_final_message: bool | None = Field(None, description="The answer goes on where the last message ends.")
    add_special_tokens: bool | None = Field(None, description="Besides those that the template writes.")
    echo: bool | None = Field(None, description="The last message, if it is the assistant's, stands before the answer.")

    @property
    def choice(self) -> ToolChoice:
        """Whether functions are to be called. Without any there is nothing to choose from."""
        if not self.tools:
            return ToolChoice("none")
        return self.tool_choice or ToolChoice("auto")

    @property
    def final_message(self) -> str | None:
        """The text of the last message, if it is the assistant's."""
        message = self.messages[-1]
        if message.role != "assistant" or message.content is None:
            return None
        return message.content if isinstance(message.content, str) else "".join(p["text"] for p in message.content)

    def refuse_unsupported(self) -> None:
        """Refuse what this server knows and cannot do, and what contradicts itself. Raises InvalidRequest."""
        for name, reason in _REFUSALS.items():
            if (self.model_extra or {}).get(name) not in (None, *self.neutral[name]):
                raise InvalidRequest(reason, name)
        super().refuse_unsupported()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true.", "top_logprobs")
        for index, message in enumerate(self.messages):
            message.check(f"messages[{index}]")
        self._check_tools()
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message and add_generation_prompt exclude each other.", "continue_final_message"
                )
            if not self.final_message:
                raise InvalidRequest(
                    "continue_final_message needs a last message of the assistant with content.",
                    "continue_final_message",
                )

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or []]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise InvalidRequest(f"There are two tools named {name}.", f"tools[{index}].function.name")
        choice = self.tool_choice
        if choice is None:
            return
        if not names and (choice.mode == "required" or choice.names):
            raise InvalidRequest("tool_choice needs tools.", "tool_choice")
        for name in choice.names or ():
            if name not in names:
                raise InvalidRequest(f"tool_choice names {name[:64]!r}, which is not among the tools.", "tool_choice")

    def ignored_fields(self) -> list[str]:
        """Those of the request, then those of its messages."""
        names = super().ignored_fields()
        for index, message in enumerate(self.messages):
            names += [f"messages[{index}].{name}" for name in message.ignored_fields()]
        return bounded_names(names)


_REFUSALS = {
    "chat_template": "chat_template is never taken from a request; the server uses the model's own.",
    "functions": "functions is an older form of tools; use tools.",
    "function_call": "function_call is an older form of tool_choice; use tool_choice.",
}
