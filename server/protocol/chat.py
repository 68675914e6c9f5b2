"""The body of `POST /v1/chat/completions`. Knows the shape of the API only: no template, no window, no engine."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from server.errors import InvalidRequest
from server.protocol.field_types import invalid
from server.protocol.fields import MAX_LOGPROBS, GenerationFields, bounded_names, refuse_non_neutral

MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 256


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
        "tool_call_id": (),
        "tool_calls": ([],),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[dict[str, Any]] | None, BeforeValidator(_check_content)] = None
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it, which know no developer."""
        content = self.content or ""
        if isinstance(content, list):
            content = [{"type": "text", "text": part["text"]} for part in content]
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}

    def ignored_fields(self) -> list[str]:
        """Names of the fields that nobody knows, of the message and of its parts."""
        names = [name for name in self.model_extra or {} if name not in self.neutral]
        if isinstance(self.content, list):
            for index, part in enumerate(self.content):
                names += [f"content[{index}].{name}" for name in part if name not in ("type", "text")]
        return names


class ChatCompletionRequest(GenerationFields):
    """A conversation to be continued, and how."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        **GenerationFields.neutral,
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "audio": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "reasoning_effort": ("none",),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def refuse_unsupported(self) -> None:
        """Refuse what this server knows and cannot do. Raises InvalidRequest."""
        super().refuse_unsupported()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true.", "top_logprobs")
        for index, message in enumerate(self.messages):
            refuse_non_neutral(message, message.neutral, f"messages[{index}].")
            if message.content is None and message.role != "assistant":
                raise InvalidRequest(
                    f"messages[{index}].content is required for the role {message.role}.", f"messages[{index}].content"
                )

    def ignored_fields(self) -> list[str]:
        """Those of the request, then those of its messages."""
        names = super().ignored_fields()
        for index, message in enumerate(self.messages):
            names += [f"messages[{index}].{name}" for name in message.ignored_fields()]
        return bounded_names(names)
