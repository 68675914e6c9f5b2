"""The content of one answer in Anthropic's form: blocks of text and of tool use, and the events of their stream.

Knows no HTTP, and nothing of the message around the content.
"""

import msgspec

from server.chat_output import ChatOutput, ContentDelta, ToolCallArguments, ToolCallBegin
from server.generation import ChoiceDelta
from server.json_values import is_object
from server.protocol.messages_answers import (
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageEvent,
    TextBlock,
    TextDelta,
    ToolUseBlock,
)
from server.protocol.responses import to_json


class MessageBlocks:
    """The content of one answer: one block after another, each complete before the next begins.

    Content that is not streamed is the fold of the same events.
    """

    def __init__(self, output: ChatOutput) -> None:
        """The answer is read by `output`."""
        self.content: list[ContentBlock] = []  # complete ones
        self.wants_tools = False  # the answer has ended with calls that can be made
        self._output = output
        self._open: ToolCallBegin | ContentDelta | None = None  # what the open block began with
        self._pieces: list[str] = []  # of its text or its input

    def push(self, delta: ChoiceDelta) -> list[MessageEvent]:
        """The events for the next piece of the answer."""
        events: list[MessageEvent] = []
        for event in self._output.push(delta):
            match event:
                case ContentDelta(text):
                    if not isinstance(self._open, ContentDelta):
                        events += [*self._close(), self._start(event, TextBlock(""))]
                    self._pieces.append(text)
                    events.append(ContentBlockDelta(len(self.content), TextDelta(text)))
                case ToolCallBegin():
                    events += [*self._close(), self._start(event, ToolUseBlock(event.call_id, event.name, _input("")))]
                case ToolCallArguments(_, text):
                    self._pieces.append(text)
                    events.append(ContentBlockDelta(len(self.content), InputJsonDelta(text)))
        if delta.finish_reason is not None:
            self.wants_tools = self._output.finish_reason(delta) == "tool_calls"
            events += self._close()
        return events

    def _start(self, event: ToolCallBegin | ContentDelta, block: ContentBlock) -> MessageEvent:
        self._open = event
        return ContentBlockStart(len(self.content), block)

    def _close(self) -> list[MessageEvent]:
        if self._open is None:
            return []
        text = "".join(self._pieces)
        if isinstance(self._open, ToolCallBegin):
            self.content.append(ToolUseBlock(self._open.call_id, self._open.name, _input(text)))
        else:
            self.content.append(TextBlock(text))
        self._open, self._pieces = None, []
        return [ContentBlockStop(len(self.content) - 1)]


def _input(arguments: str) -> msgspec.Raw:
    """The input of a tool. What is no JSON object, cut off or broken, stays as it is under Anthropic's name for it."""
    if not arguments:
        return msgspec.Raw(b"{}")
    return msgspec.Raw(arguments.encode() if is_object(arguments) else to_json({"INVALID_JSON": arguments}))
