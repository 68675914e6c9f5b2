"""How the text of a chat's answers is to be read, as its request decided. Knows no form of tool calls in particular."""

from dataclasses import dataclass
from typing import Protocol

from server.tool_parsers.events import ToolCallReader


class ToolCallFormat(Protocol):
    """One way of writing tool calls."""

    def reader(self, function_names: frozenset[str], *, calls_only: bool) -> ToolCallReader:
        """For one answer of a model that was told of these functions."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the answers to one request are to be read."""

    tool_format: ToolCallFormat | None = None  # None: the text is all content
    function_names: frozenset[str] = frozenset()
    calls_only: bool = False  # nothing else was allowed: the beginning of a call is no content
    echo: str = ""  # stands before the content of each answer
    shown_token_ids: frozenset[int] = frozenset()  # special tokens that are part of the text: they mark calls


ALL_CONTENT = AnswerForm()
