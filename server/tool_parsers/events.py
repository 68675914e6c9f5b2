"""What is read out of the text of an answer, piece by piece. Knows no form of tool calls and no API."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """The next piece of what the model says to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """The model calls a function; its arguments follow."""

    position: int  # among the calls of the answer, from 0
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of the JSON text of a call's arguments, as the model wrote it."""

    position: int
    text: str


ChatEvent = ContentDelta | ToolCallBegin | ToolCallArguments


class ToolCallReader(Protocol):
    """Reads one answer. The events, joined, do not depend on how the text was cut."""

    def push(self, text: str) -> list[ChatEvent]:
        """Take the next piece of text. Its cost does not grow with the text before it."""
        ...

    def finish(self) -> list[ChatEvent]:
        """End the answer: what was held back."""
        ...
