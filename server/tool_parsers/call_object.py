"""One function call out of text that comes in pieces: its name as soon as it is known, its arguments as they come.

Takes time linear in the text, however it is cut. Knows two ways to write a call, and nothing of what stands around it.
"""

import json
import re
from collections.abc import Callable
from typing import Literal

from server.json_values import is_object

FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_MAX_STRING = 512  # characters of a key or a name
_WHITESPACE = " \t\r\n"
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE_STRING = re.compile(r'["{}\[\]<]')
_SCALAR_END = re.compile(r"[,}\]\s<]")
_NAME_FIRST = re.compile(r"\s*([a-zA-Z0-9_.:/-]{1,128})\s*(?:\[CALL_ID\][^\[\]]{0,64})?(?:\[ARGS\])?\s*")

Status = Literal["open", "complete", "broken"]


class JsonExtent:
    """Finds where a JSON value ends, by its quotes and brackets. That it is valid inside is not looked at."""

    def __init__(self) -> None:
        """At the first character of the value."""
        self.is_complete = False
        self._depth = 0
        self._in_string = False
        self._is_scalar: bool | None = None  # a number or a word, which ends before what ends it
        self._is_escaped = False

    def push(self, text: str) -> int:
        """How many characters of `text` belong to the value. It ends, broken, before a `<` outside of its strings."""
        position = 0
        if self._is_scalar is None and text:
            self._is_scalar = text[0] not in '"{['
        while position < len(text) and not self.is_complete:
            position = self._advance(text, position)
        return position

    def _advance(self, text: str, position: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return position + 1
        pattern = _IN_STRING if self._in_string else _SCALAR_END if self._is_scalar else _OUTSIDE_STRING
        found = pattern.search(text, position)
        if found is None:
            return len(text)
        if self._is_scalar or (not self._in_string and found[0] == "<"):
            self.is_complete = True
            return found.start()
        if found[0] == "\\":
            self._is_escaped = True
        elif found[0] == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if found[0] in "{[" else -1
        self.is_complete = not self._in_string and not self._is_escaped and self._depth == 0
        return found.end()


class CallObject:
    """A call written as `{"name": "f", "arguments": {...}}`; `parameters` means the same, and the order is free."""

    def __init__(self, known_names: frozenset[str] | None = None) -> None:
        """`known_names` is given where the text may as well be no call: other names, or no arguments, break it."""
        self.name: str | None = None
        self.has_begun = False  # name known, arguments known to come or not to come
        self.status: Status = "open"
        self._known_names = known_names
        self._taken: list[str] = []
        self._unread = ""
        self._step: Callable[[], bool] = self._open
        self._key = ""
        self._extent: JsonExtent | None = None
        self._held: list[str] = []  # arguments that cannot be handed out yet
        self._ready: list[str] = []
        self._streams = False  # whether the arguments are handed out as they are

    @property
    def rest(self) -> str:
        """What follows the end of the call, or the point at which it is broken."""
        return self._unread

    @property
    def raw(self) -> str:
        """Everything that was pushed until the call began, without `rest`."""
        text = "".join(self._taken)
        return text[: len(text) - len(self._unread)]

    def push(self, text: str) -> str:
        """Take the next piece of text; the arguments that it brings, once the call has begun."""
        self._unread += text
        if not self.has_begun:
            self._taken.append(text)
        while self.status == "open" and self._step():
            pass
        if not self.has_begun:
            return ""
        self._taken = []
        ready, self._ready = "".join(self._ready), []
        return ready

    def _next(self) -> str:
        """The next character that is no whitespace, left unread; empty if it has not come."""
        self._unread = self._unread.lstrip(_WHITESPACE)
        return self._unread[:1]

    def _expect(self, choices: dict[str, Callable[[], bool]]) -> bool:
        """Take one of these characters, and go on with what is to follow it."""
        char = self._next()
        if not char:
            return False
        if char not in choices:
            self.status = "broken"
            return False
        self._unread = self._unread[1:]
        self._step = choices[char]
        return True

    def _take_string(self) -> str | None:
        """A whole string, decoded; None if it is broken or has not come."""
        found = _STRING.match(self._unread)
        length = len(self._unread) if found is None else found.end()
        if self._unread[0] != '"' or length > _MAX_STRING:
            self.status = "broken"
            return None
        if found is None:
            return None
        decoded = _decoded(found[0])
        if decoded is None:
            self.status = "broken"
        else:
            self._unread = self._unread[found.end() :]
        return decoded

    def _open(self) -> bool:
        return self._expect({"{": self._first_key})

    def _first_key(self) -> bool:
        if self._next() == "}":
            self._unread = self._unread[1:]
            return self._end()
        return self._take_key()

    def _take_key(self) -> bool:
        if not self._next():
            return False
        key = self._take_string()
        if key is None:
            return False
        self._key = key
        self._step = self._colon
        return True

    def _colon(self) -> bool:
        return self._expect({":": self._value})

    def _value(self) -> bool:
        char = self._next()
        if not char:
            return False
        if self._key == "name" and self.name is None:
            return self._take_name()
        is_arguments = self._key in ("arguments", "parameters") and self._extent is None
        if is_arguments:
            self._streams = char == "{"
            self._extent = extent = JsonExtent()
        else:
            extent = JsonExtent()
        self._step = lambda: self._take_value(extent, is_arguments=is_arguments)
        if is_arguments and self._streams:
            self._begin()
        return True

    def _take_name(self) -> bool:
        name = self._take_string()
        if name is None:
            return False
        if not FUNCTION_NAME.fullmatch(name) or (self._known_names is not None and name not in self._known_names):
            self.status = "broken"
            return False
        self.name = name
        self._step = self._after_value
        self._begin()
        return True

    def _take_value(self, extent: JsonExtent, *, is_arguments: bool) -> bool:
        length = extent.push(self._unread)
        piece, self._unread = self._unread[:length], self._unread[length:]
        if is_arguments:
            (self._ready if self._streams and self.has_begun else self._held).append(piece)
        if not extent.is_complete:
            return False
        if is_arguments and not self._streams:
            self._held, self._streams = [_as_object("".join(self._held))], True
            self._begin()
        self._step = self._after_value
        return True

    def _after_value(self) -> bool:
        if self._next() == "}":
            self._unread = self._unread[1:]
            return self._end()
        return self._expect({",": self._take_key})

    def _begin(self) -> None:
        """The call has begun once its name is known and its arguments can be handed out. Those held are whole."""
        if self.name is None or not self._streams or self.has_begun:
            return
        if self._held and not is_object("".join(self._held)):
            self.status = "broken"
            return
        self.has_begun = True
        self._ready, self._held = self._held, []

    def _end(self) -> bool:
        if not self.has_begun and self.name is not None and self._known_names is None:
            self._held, self._streams = ["{}"], True
            self._begin()
        self.status = "complete" if self.has_begun else "broken"
        return False


class NamedArguments:
    """A call written as `f{...}`, perhaps with Mistral's tokens `[CALL_ID]`, an id, and `[ARGS]` after the name."""

    def __init__(self) -> None:
        """At the name."""
        self.name: str | None = None
        self.status: Status = "open"
        self._extent = JsonExtent()
        self._unread = ""
        self._header = ""

    @property
    def has_begun(self) -> bool:
        """Whether the name is known."""
        return self.name is not None

    @property
    def rest(self) -> str:
        """What follows the arguments, or the point at which the call is broken."""
        return self._unread

    @property
    def raw(self) -> str:
        """Everything that was pushed until the call began, without `rest`."""
        return self._header

    def push(self, text: str) -> str:
        """Take the next piece of text; the arguments that it brings."""
        self._unread += text
        if self.name is None and not self._take_name():
            return ""
        length = self._extent.push(self._unread)
        piece, self._unread = self._unread[:length], self._unread[length:]
        if self._extent.is_complete:
            self.status = "complete"
        return piece

    def _take_name(self) -> bool:
        length = self._unread.find("{", 0, _MAX_STRING)
        header = self._unread[:length] if length >= 0 else ""
        found = _NAME_FIRST.fullmatch(header)
        if found is None:
            if length >= 0 or len(self._unread) >= _MAX_STRING:
                self.status = "broken"
                length = length if length >= 0 else _MAX_STRING
                self._header, self._unread = self._unread[:length], self._unread[length:]
            return False
        self.name = found[1]
        self._unread = self._unread[length:]
        return True


def _decoded(string: str) -> str | None:
    """The text of a JSON string; None if it is none, or no Unicode text."""
    try:
        text: str = json.loads(string, strict=False)
        text.encode()
    except ValueError:  # UnicodeEncodeError included: half of a surrogate pair
        return None
    return text


def _as_object(value: str) -> str:
    """Arguments that are no object: some models put the object into a string, or write null for none."""
    if value == "null":
        return "{}"
    if value.startswith('"'):
        decoded = _decoded(value)
        return value if decoded is None else decoded
    return value
