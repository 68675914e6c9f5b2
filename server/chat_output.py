"""From the text of an answer to what a chat's client sees: content, tool calls, and why it ended.

The same for every API that answers conversations, streamed or whole: a whole answer is the fold of the same events.
Knows no HTTP, no JSON of any API and no engine.
"""

from dataclasses import dataclass
from typing import Literal

from scheduler.output import FinishReason
from server.generation import ChoiceDelta, ChoiceResult
from server.json_values import is_object
from server.preparation import PreparedRequest
from server.tool_parsers.events import ChatEvent, ContentDelta, ToolCallArguments, ToolCallBegin, ToolCallReader

__all__ = ["ChatAnswer", "ChatEvent", "ChatOutput", "ContentDelta", "ToolCall", "ToolCallArguments", "ToolCallBegin"]

ChatFinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called."""

    call_id: str
    name: str
    arguments: str  # as the model wrote it: JSON if `finish_reason` is tool_calls, else perhaps incomplete or broken


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One whole answer."""

    content: str | None  # None: tool calls only
    tool_calls: tuple[ToolCall, ...]
    finish_reason: ChatFinishReason


class ChatOutput:
    """The answers to one request, read as they come."""

    def __init__(self, request: PreparedRequest) -> None:
        """For the answers to `request`."""
        self._form = request.answer_form
        self._choices: dict[int, _Choice] = {}

    def push(self, delta: ChoiceDelta) -> list[ChatEvent]:
        """What the next piece of one answer shows: nothing, if it may be the beginning of a tool call."""
        return self._choice(delta.index).push(delta.text, is_last=delta.finish_reason is not None)

    def finish_reason(self, delta: ChoiceDelta) -> ChatFinishReason | None:
        """Why the answer ended with this delta, which has been pushed; None: it has not."""
        return None if delta.finish_reason is None else self._choice(delta.index).finish_reason(delta.finish_reason)

    def whole(self, result: ChoiceResult) -> ChatAnswer:
        """One whole answer. Not to be mixed with `push`."""
        assert result.finish_reason is not None, "the answer has not ended"
        choice = self._new_choice()
        events = choice.push(result.text, is_last=True)
        content, calls = "".join(event.text for event in events if isinstance(event, ContentDelta)), choice.calls
        return ChatAnswer(None if calls and not content else content, calls, choice.finish_reason(result.finish_reason))

    def _choice(self, index: int) -> "_Choice":
        if index not in self._choices:
            self._choices[index] = self._new_choice()
        return self._choices[index]

    def _new_choice(self) -> "_Choice":
        form = self._form
        reader = None
        if form.tool_format is not None:
            reader = form.tool_format.reader(form.function_names, calls_only=form.calls_only)
        return _Choice(reader, form.echo)


class _Choice:
    """One answer in the making."""

    def __init__(self, reader: ToolCallReader | None, echo: str) -> None:
        self._reader = reader
        self._echo = echo
        self._begun: list[ToolCallBegin] = []
        self._arguments: list[list[str]] = []  # of each call, in pieces

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """As far as they came."""
        pairs = zip(self._begun, self._arguments, strict=True)
        return tuple(ToolCall(begun.call_id, begun.name, "".join(pieces)) for begun, pieces in pairs)

    def push(self, text: str, *, is_last: bool) -> list[ChatEvent]:
        events: list[ChatEvent] = [ContentDelta(self._echo)] if self._echo else []
        self._echo = ""
        if self._reader is None:
            return [*events, ContentDelta(text)] if text else events
        events += self._reader.push(text)
        if is_last:
            events += self._reader.finish()
        for event in events:
            if isinstance(event, ToolCallBegin):
                self._begun.append(event)
                self._arguments.append([])
            elif isinstance(event, ToolCallArguments):
                self._arguments[event.position].append(event.text)
        return events

    def finish_reason(self, reason: FinishReason) -> ChatFinishReason:
        assert reason in ("stop", "length"), f"an answer ended with {reason}"
        if reason == "length":
            return "length"
        # What was handed out cannot be taken back; but a client must not call with what is no arguments.
        can_call = self._begun and all(is_object(call.arguments) for call in self.calls)
        return "tool_calls" if can_call else "stop"
