"""Reads an answer that may hold tool calls between, or after, the model's markers; all else is content.

Whatever does not read as a call stays content, to the letter; whitespace around calls does not, nor does a call that
the end of the answer cut, where calls stand before it or nothing but calls was allowed. Once a call has begun its
arguments are handed out as the model wrote them. Knows no API.
"""

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from server.tool_parsers.call_object import CallObject, NamedArguments
from server.tool_parsers.events import ChatEvent, ContentDelta, ToolCallArguments, ToolCallBegin

_WHITESPACE = " \t\r\n"
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Markup:
    """What stands around the calls of an answer."""

    start: str  # before one or more calls
    end: str = ""  # after them; empty: they end where something else begins
    bare: bool = False  # a call that is the very beginning of the answer needs no marker
    name_first: bool = False  # calls may have the form f{...}
    short_ids: bool = False  # call ids of nine letters and digits, which is all that Mistral's templates take


class MarkupReader:
    """Reads one answer. Nothing that it hands out depends on how the text was cut."""

    def __init__(self, markup: Markup, function_names: frozenset[str], *, calls_only: bool) -> None:
        """For an answer of a model that was told of these functions, and perhaps had nothing else to say."""
        self._markup = markup
        self._function_names = function_names
        self._calls_only = calls_only
        self._unread = ""
        self._events: list[ChatEvent] = []
        self._state: Callable[[], bool] = self._at_start if markup.bare else self._in_content
        self._call: CallObject | NamedArguments = CallObject()
        self._raw = ""  # since the last content or call: content after all, if no call follows
        self._num_calls = 0
        self._region_calls = 0  # since the marker
        self._is_after_call = False  # only whitespace came since

    def push(self, text: str) -> list[ChatEvent]:
        """Take the next piece of text."""
        self._unread += text
        while self._state():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[ChatEvent]:
        """End the answer: what was held back and is no call, is content, unless it is the beginning of one."""
        if not self._calls_only:
            if self._state == self._in_call and not self._call.has_begun and self._is_unmarked:
                self._reread()
                while self._state():
                    pass
            self._add_content(self._held_content())
        self._unread = ""
        events, self._events = self._events, []
        return events

    def _held_content(self) -> str:
        """What was held back and is content: once there are calls, the beginning of a further one is none."""
        if self._state == self._in_call:
            return "" if self._num_calls else self._raw + self._call.raw + self._call.rest
        if self._state == self._in_region:
            return "" if self._num_calls else self._raw + self._unread
        return "" if self._is_after_call else self._unread

    def _add_content(self, text: str) -> None:
        if text:
            self._events.append(ContentDelta(text))
            self._is_after_call = False

    def _at_start(self) -> bool:
        """Before the first character that tells whether the answer is a bare call."""
        text = self._unread.lstrip(_WHITESPACE)
        if not text:
            return False
        if text[0] != "{":
            self._state = self._in_content
            return True
        self._raw = self._unread[: len(self._unread) - len(text)]
        self._unread = text
        self._begin_call(CallObject(self._function_names))
        return True

    def _in_content(self) -> bool:
        start = self._markup.start
        position = self._unread.find(start)
        is_marked = position >= 0
        if not is_marked:
            position = len(self._unread) - _num_pending(self._unread, start)
        content = self._unread[:position].rstrip(_WHITESPACE)
        self._add_content(content)
        self._unread = self._unread[len(content) :]
        if not is_marked:
            return False
        marked = position - len(content) + len(start)
        self._raw, self._unread = self._unread[:marked], self._unread[marked:]
        self._region_calls = 0
        self._state = self._in_region
        return True

    def _in_region(self) -> bool:
        """After a marker, or between two calls."""
        skipped = _WHITESPACE + (",;]}" if self._region_calls else "[")
        while True:
            for marker in (self._markup.start, self._markup.end):
                if marker and len(self._unread) < len(marker) and marker.startswith(self._unread):
                    return False
            if self._markup.end and self._unread.startswith(self._markup.end) and self._region_calls:
                self._unread = self._unread.removeprefix(self._markup.end)
                self._raw = ""
                self._state = self._in_content
                return True
            if self._unread.startswith(self._markup.start) or self._unread[0] not in skipped:
                break
            self._raw += self._unread[0]
            self._unread = self._unread[1:]
        if self._unread[0] == "{":
            self._begin_call(CallObject(self._function_names if self._markup.bare and self._region_calls else None))
        elif self._markup.name_first and not self._region_calls and self._unread[0] not in "[<":
            self._begin_call(NamedArguments())
        else:
            self._leave_region()
        return True

    def _leave_region(self) -> None:
        """No further call here: what was skipped is content, unless it only stood around a call."""
        is_markup = self._region_calls and (self._markup.end or not self._raw.strip(_WHITESPACE + "]}"))
        self._unread = (_whitespace_end(self._raw) if is_markup else "") + self._unread
        if not is_markup:
            self._add_content(self._raw)
        self._raw = ""
        self._state = self._in_content

    def _begin_call(self, call: CallObject | NamedArguments) -> None:
        self._call = call
        self._state = self._in_call

    def _in_call(self) -> bool:
        call = self._call
        had_begun = call.has_begun
        text, self._unread = self._unread, ""
        arguments = call.push(text)
        if call.has_begun and not had_begun:
            assert call.name is not None
            self._events.append(ToolCallBegin(self._num_calls, self._new_id(), call.name))
            self._num_calls += 1
            self._region_calls += 1
            self._raw = ""
        if arguments:
            self._events.append(ToolCallArguments(self._num_calls - 1, arguments))
        if call.status == "open":
            return False
        self._unread = call.rest
        if not call.has_begun and self._is_unmarked:
            self._reread()
        elif call.has_begun:
            self._is_after_call = True
            self._state = self._in_region
        else:
            self._add_content(self._raw + call.raw)
            self._raw = ""
            self._state = self._in_content
        return True

    @property
    def _is_unmarked(self) -> bool:
        """Whether the answer began as a bare call does, and has come no further."""
        return self._markup.bare and not self._num_calls and not self._raw.strip(_WHITESPACE)

    def _reread(self) -> None:
        """What began as a bare call is none: read it again as content, in which there may be a marker."""
        self._unread = self._raw + self._call.raw + self._call.rest
        self._raw = ""
        self._state = self._in_content

    def _new_id(self) -> str:
        if self._markup.short_ids:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def _num_pending(text: str, marker: str) -> int:
    """Length of the longest end of `text` that the marker may begin with."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def _whitespace_end(text: str) -> str:
    return text[len(text.rstrip(_WHITESPACE)) :]
