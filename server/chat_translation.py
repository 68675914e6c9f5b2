"""Other APIs' conversations as chat requests: they are checked, written out and sampled as chats are.

What is wrong with a chat that was made from another API's body is told in the words of that body. Knows no API in
particular, no template and no engine.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from server.errors import InvalidRequest
from server.preparation import PreparedRequest
from server.protocol.chat import ChatCompletionRequest
from server.protocol.fields import parse_body

# A name that could be a word of the sentence too is a field only where one of these follows, or where it begins.
_FIELD_FOLLOWS = r"(?=[\[.]|\s(?:has|is|may|must|needs|contains|cannot)\b)"


@dataclass(slots=True)
class ChatTranslation:
    """A chat request in the making, and where its pieces come from."""

    names: Mapping[str, str]  # fields of chats -> fields of the API that the body is of
    fields: dict[str, Any] = field(default_factory=dict)  # of the chat; None where absent
    messages: list[dict[str, Any]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)  # of each message: its path in the body

    def add(self, origin: str, message: dict[str, Any]) -> None:
        """The next message, made from what stands at `origin` in the body."""
        self.messages.append(message)
        self.origins.append(origin)

    def chat_request(self) -> ChatCompletionRequest:
        """The chat, checked as a body of one. Raises InvalidRequest in the words of the original body."""
        body = {name: value for name, value in self.fields.items() if value is not None}
        with self.naming():
            return parse_body(ChatCompletionRequest, json.dumps({**body, "messages": self.messages}).encode())

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Raise what is raised within, in the words of the original body."""
        try:
            yield
        except InvalidRequest as error:
            param = None if error.param is None else self._renamed(error.param)
            raise type(error)(self._renamed(error.message), param) from None

    def _renamed(self, text: str) -> str:
        text = re.sub(r"\bmessages\[(\d+)\]", self._origin, text)
        for name in sorted(self.names, key=len, reverse=True):
            field_name = rf"(?<![\w.]){re.escape(name)}"
            pattern = rf"{field_name}\b" if "_" in name else rf"^{name}\b|{field_name}{_FIELD_FOLLOWS}"
            text = re.sub(pattern, self.names[name], text)
        return text

    def _origin(self, found: re.Match[str]) -> str:
        position = int(found[1])
        return self.origins[position] if position < len(self.origins) else found[0]


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    """How many tokens a prompt has, and which fields of its request nobody knows."""

    num_tokens: int
    ignored_fields: tuple[str, ...]


def fields_of(prepared: PreparedRequest) -> dict[str, Any]:
    """To make a richer object of it."""
    return {each.name: getattr(prepared, each.name) for each in fields(prepared)}


def text_content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """The content of a message: one text as it is, several as parts."""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None
) -> dict[str, Any]:
    """A tool as chats have it."""
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}
