"""Other APIs' conversations as chat requests: they are checked, written out and sampled as chats are.

What is wrong with a chat that was made from another API's body is told in the words of that body. Knows no API in
particular, no template and no engine.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from scheduler.sampling_params import SamplingParams
from server.chat_preparation import conversation_tokens, ignored_variables, prepare_conversation
from server.errors import InvalidRequest
from server.preparation import PreparedRequest
from server.protocol.chat import ChatCompletionRequest
from server.protocol.fields import bounded_names, parse_body
from server.served_model import ServedModel

_MESSAGE = re.compile(r"\bmessages\[(\d+)\](?:\.tool_calls\[(\d+)\](?:\.function(\.arguments)?)?)?")
_TOOL_FIELD = re.compile(r"\b(tools\[\d+\])\.function\.(\w+)")
# A name that could be a word of the sentence too is a field only where one of these follows, or where it begins.
_FIELD_FOLLOWS = r"(?=[\[.]|\s(?:has|is|may|must|needs|contains|cannot)\b)"


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    """How many tokens a prompt has, and which fields of its request nobody knows."""

    num_tokens: int
    ignored_fields: tuple[str, ...]


@dataclass(slots=True)
class ChatTranslation:
    """A chat request in the making, and where its pieces come from."""

    # Fields of chats -> fields of the API that the body is of; "function.x" is one of a tool, "arguments" of a call.
    names: Mapping[str, str]
    fields: dict[str, Any]  # of the chat; None where absent
    messages: list[dict[str, Any]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)  # of each message: its path in the body
    call_origins: dict[tuple[int, int], str] = field(default_factory=dict)  # of each call of each message

    def add(self, origin: str, message: dict[str, Any]) -> None:
        """The next message, made from what stands at `origin` in the body."""
        self.messages.append(message)
        self.origins.append(origin)

    def add_call(self, origin: str, call_id: str | None, name: str | None, arguments: str | None) -> None:
        """A call of the last message, which is the assistant's."""
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        self.call_origins[len(self.messages) - 1, len(calls) - 1] = origin

    def prepare(
        self, model: ServedModel, ignored_fields: Sequence[str], max_tokens: int | None = None
    ) -> PreparedRequest:
        """What the engine takes. Raises ApiError in the words of the original body.

        `max_tokens` bounds an answer that the window may end before; in the chat's fields it must fit the window.
        """
        with self._naming():
            prepared = prepare_conversation(self._chat_request(), model, max_tokens)
        variables = [name for name in prepared.ignored_fields if name.startswith("chat_template_kwargs.")]
        prompts = tuple(replace(prompt, params=self._named(prompt.params)) for prompt in prepared.prompts)
        return replace(prepared, prompts=prompts, ignored_fields=tuple(bounded_names([*ignored_fields, *variables])))

    def count(self, model: ServedModel, ignored_fields: Sequence[str]) -> CountedPrompt:
        """How many tokens the prompt has. Raises ApiError in the words of the original body."""
        model.check_name(self.fields["model"])
        with self._naming():
            request = self._chat_request()
            num_tokens = len(conversation_tokens(request, model))
        names = [*ignored_fields, *ignored_variables(request, model)]
        return CountedPrompt(num_tokens, tuple(bounded_names(names)))

    def _chat_request(self) -> ChatCompletionRequest:
        """The chat, read as a body of one."""
        body = {name: value for name, value in self.fields.items() if value is not None}
        return parse_body(ChatCompletionRequest, json.dumps({**body, "messages": self.messages}).encode())

    def _named(self, params: SamplingParams) -> SamplingParams:
        """The engine tells by a field's name which grammar it refuses."""
        grammar = params.structured_output
        if grammar is None:
            return params
        return replace(params, structured_output=replace(grammar, param=self._renamed(grammar.param)))

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Raise what is raised within, in the words of the original body."""
        try:
            yield
        except InvalidRequest as error:
            param = None if error.param is None else self._renamed(error.param)
            raise type(error)(self._renamed(error.message), param) from None

    def _renamed(self, text: str) -> str:
        text = _MESSAGE.sub(self._origin, text)
        text = _TOOL_FIELD.sub(lambda found: f"{found[1]}.{self.names.get(f'function.{found[2]}', found[2])}", text)
        for name in sorted(self.names, key=len, reverse=True):
            field_name = rf"(?<![\w.]){re.escape(name)}"
            pattern = rf"{field_name}\b" if "_" in name else rf"^{name}\b|{field_name}{_FIELD_FOLLOWS}"
            text = re.sub(pattern, self.names[name], text)
        return text

    def _origin(self, found: re.Match[str]) -> str:
        position = int(found[1])
        if position >= len(self.origins):
            return found[0]
        if found[2] is None:
            return self.origins[position]
        origin = self.call_origins.get((position, int(found[2])), self.origins[position])
        return origin if found[3] is None else f"{origin}.{self.names.get('arguments', 'arguments')}"


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


def chosen_function(name: str | None) -> dict[str, Any]:
    """How chats name one of the tools."""
    return {"type": "function", "function": {"name": name}}
