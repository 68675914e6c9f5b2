"""The body of a request in the form that the server is asked in. Sends nothing that was not asked for.

Fields that only some servers know (`ignore_eos`, say) stand in it only when a person wants them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from server.load_test.plan import Message, PlannedSession, Prompt

Endpoint = Literal["completions", "chat"]

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class RequestForm:
    """What all requests of a load have in common."""

    model: str
    endpoint: Endpoint = "completions"
    max_tokens_field: str = "max_tokens"
    asks_usage: bool = True
    ignore_eos: bool = False
    temperature: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)  # more fields, as they stand

    @property
    def path(self) -> str:
        """Where requests go."""
        return _PATHS[self.endpoint]

    def body(self, prompt: Prompt, max_tokens: int) -> bytes:
        """A streamed request for at most `max_tokens` tokens."""
        fields: dict[str, Any] = {"model": self.model, **self._asking(prompt), self.max_tokens_field: max_tokens}
        fields["stream"] = True
        if self.asks_usage:
            fields["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        return msgspec.json.encode({**fields, **self.extra})

    def continued(self, said: Prompt, answer: str, prompt: Prompt) -> Prompt:
        """The prompt of a conversation's next turn: all that was said, the answer, and what comes now."""
        if self.endpoint == "chat":
            return [*as_messages(said), {"role": "assistant", "content": answer}, *as_messages(prompt)]
        assert isinstance(said, str) and isinstance(prompt, str), "conversations are of text"
        return said + answer + prompt

    def _asking(self, prompt: Prompt) -> dict[str, Any]:
        return {"messages": as_messages(prompt)} if self.endpoint == "chat" else {"prompt": prompt}


def as_messages(prompt: Prompt) -> list[Message]:
    """What a chat is asked: a text is what the user says."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt.strip()}]
    return [message for message in prompt if isinstance(message, dict)]


class Talk:
    """One session as it goes on."""

    def __init__(self, form: RequestForm, session: PlannedSession) -> None:
        """Nothing is said yet."""
        self._form = form
        self._session = session
        self._said: Prompt | None = None  # up to the last prompt
        self._answer = ""

    def body(self, turn: int) -> bytes:
        """The request of a turn; each is asked for once, in their order. The first may have been made elsewhere."""
        request = self._session.requests[turn]
        return self._form.body(self._prompt(turn), request.max_tokens)

    def hear(self, answer: str) -> None:
        """Take in what the server said."""
        self._answer = answer

    def _prompt(self, turn: int) -> Prompt:
        prompt = self._session.requests[turn].make_prompt()
        if not self._session.is_conversation:
            return prompt
        if turn:
            said = self._session.requests[0].make_prompt() if self._said is None else self._said
            prompt = self._form.continued(said, self._answer, prompt)
        self._said = prompt
        return prompt
