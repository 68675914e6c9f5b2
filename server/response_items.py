"""The output of one answer in the form of OpenAI's responses: messages and function calls, and the events of a stream.

Knows no HTTP, and nothing of the response around the output.
"""

import uuid
from collections.abc import Iterator

from server.chat_output import ChatOutput, ContentDelta, ToolCallArguments, ToolCallBegin
from server.generation import ChoiceDelta
from server.json_values import is_object
from server.protocol.response_objects import (
    ContentPartAdded,
    ContentPartDone,
    FunctionCall,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    ItemStatus,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    StreamEvent,
)
from server.protocol.responses import ChatTokenLogprob
from server.protocol.shaping import chat_logprobs
from server.scored_tokens import ScoredToken


class ResponseItems:
    """The items of one answer: one after another, each complete before the next begins.

    Output that is not streamed is the fold of the same events.
    """

    def __init__(self, output: ChatOutput, numbers: Iterator[int]) -> None:
        """The answer is read by `output`; `numbers` counts the events."""
        self.items: list[OutputItem] = []  # complete ones
        self._output = output
        self._numbers = numbers
        self._scores = _ContentScores()
        self._open: _OpenMessage | _OpenCall | None = None

    def push(self, delta: ChoiceDelta) -> list[StreamEvent]:
        """The events for the next piece of the answer."""
        events: list[StreamEvent] = []
        self._scores.add(delta.tokens)
        for event in self._output.push(delta):
            match event:
                case ContentDelta(text):
                    events += self._add_text(text, self._scores.take(text))
                case ToolCallBegin():
                    self._scores.end()
                    events += self._close("completed")
                    self._open = _OpenCall(event, len(self.items))
                    events.append(self._open.begin(self._numbers))
                case ToolCallArguments(_, text):
                    assert isinstance(self._open, _OpenCall), "arguments of no call"
                    events.append(self._open.add(text, self._numbers))
        if delta.finish_reason is not None:
            events += self._finish("incomplete" if delta.finish_reason == "length" else "completed")
        return events

    def _add_text(self, text: str, logprobs: list[ChatTokenLogprob]) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        if not isinstance(self._open, _OpenMessage):
            events += self._close("completed")
            self._open = _OpenMessage(len(self.items))
            events += self._open.begin(self._numbers)
        if text or logprobs:
            events.append(self._open.add(text, logprobs, self._numbers))
        return events

    def _finish(self, status: ItemStatus) -> list[StreamEvent]:
        """An answer without any text and any call still has a message."""
        events: list[StreamEvent] = []
        rest = self._scores.take_rest()
        if rest or (self._open is None and not self.items):
            events += self._add_text("", rest)
        return events + self._close(status)

    def _close(self, status: ItemStatus) -> list[StreamEvent]:
        if self._open is None:
            return []
        item, events = self._open.end(status, self._numbers)
        self.items.append(item)
        self._open = None
        return events


class _OpenMessage:
    """A message in the making."""

    def __init__(self, position: int) -> None:
        self._id = f"msg_{uuid.uuid4().hex}"
        self._position = position
        self._texts: list[str] = []
        self._logprobs: list[ChatTokenLogprob] = []

    def begin(self, numbers: Iterator[int]) -> list[StreamEvent]:
        message = OutputMessage(self._id, "in_progress", [])
        return [
            OutputItemAdded(next(numbers), self._position, message),
            ContentPartAdded(next(numbers), self._id, self._position, OutputText("", [])),
        ]

    def add(self, text: str, logprobs: list[ChatTokenLogprob], numbers: Iterator[int]) -> StreamEvent:
        self._texts.append(text)
        self._logprobs += logprobs
        return OutputTextDelta(next(numbers), self._id, self._position, text, logprobs)

    def end(self, status: ItemStatus, numbers: Iterator[int]) -> tuple[OutputItem, list[StreamEvent]]:
        text = "".join(self._texts)
        part = OutputText(text, self._logprobs)
        message = OutputMessage(self._id, status, [part])
        return message, [
            OutputTextDone(next(numbers), self._id, self._position, text, self._logprobs),
            ContentPartDone(next(numbers), self._id, self._position, part),
            OutputItemDone(next(numbers), self._position, message),
        ]


class _OpenCall:
    """A function call in the making."""

    def __init__(self, call: ToolCallBegin, position: int) -> None:
        self._id = f"fc_{uuid.uuid4().hex}"
        self._call = call
        self._position = position
        self._pieces: list[str] = []

    def begin(self, numbers: Iterator[int]) -> StreamEvent:
        return OutputItemAdded(next(numbers), self._position, self._item("", "in_progress"))

    def add(self, text: str, numbers: Iterator[int]) -> StreamEvent:
        self._pieces.append(text)
        return FunctionCallArgumentsDelta(next(numbers), self._id, self._position, text)

    def end(self, status: ItemStatus, numbers: Iterator[int]) -> tuple[OutputItem, list[StreamEvent]]:
        arguments = "".join(self._pieces)
        item = self._item(arguments, status if is_object(arguments) else "incomplete")
        return item, [
            FunctionCallArgumentsDone(next(numbers), self._id, self._position, self._call.name, arguments),
            OutputItemDone(next(numbers), self._position, item),
        ]

    def _item(self, arguments: str, status: ItemStatus) -> FunctionCall:
        return FunctionCall(self._id, self._call.call_id, self._call.name, arguments, status)


class _ContentScores:
    """The log-probabilities of what is said before the first call: the tokens of a call are no content."""

    def __init__(self) -> None:
        self._pending: list[ScoredToken] = []
        self._num_chars = 0  # of the content so far
        self._has_ended = False

    def add(self, tokens: tuple[ScoredToken, ...]) -> None:
        """Tokens whose text has come, or is on its way."""
        if not self._has_ended:
            self._pending += tokens

    def take(self, text: str) -> list[ChatTokenLogprob]:
        """Those of the next piece of content."""
        self._num_chars += len(text)
        num_ready = sum(token.offset < self._num_chars for token in self._pending)  # offsets only grow
        ready, self._pending = self._pending[:num_ready], self._pending[num_ready:]
        return chat_logprobs(ready).content

    def take_rest(self) -> list[ChatTokenLogprob]:
        """Those that have no text."""
        ready, self._pending = self._pending, []
        return chat_logprobs(ready).content

    def end(self) -> None:
        """A call begins."""
        self._has_ended = True
        self._pending = []
