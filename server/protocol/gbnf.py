"""Reads a grammar in either of the two notations that requests bring: Lark as it stands, GBNF (llama.cpp's) as Lark.

Whatever part of a GBNF grammar is regular becomes one regular expression, so that a grammar without recursion keeps its
language exactly. Between recursive rules each expression is a lexeme, which takes as much text as it can: there the
language may shrink, and never grows.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

# Read in time linear in the grammar, whatever it is filled with: no two neighbours can share what they match.
_LARK = re.compile(r"^[ \t]*+(?:%llguidance\b|start\s*+:(?!:=))", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_REPEAT = re.compile(r"\{\s*+(\d{1,5})\s*+(?:(,)\s*+(\d{1,5})?\s*+)?\}")
_CODE_POINT = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_SUFFIXES: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_MAX_NESTING = 64  # brackets inside one another
_MAX_EXPRESSION = 32 << 10  # characters; a rule whose expression is longer stays a rule
_MAX_LARK = 512 << 10  # characters of all expressions
_LAST_CODE_POINT = 0x10FFFF


class GrammarError(ValueError):
    """A grammar that cannot be read; the message says why, without a full stop."""


@dataclass(slots=True)
class _Node:
    """One element of a rule. `text` is a finished regular expression, or the name of a rule."""

    kind: Literal["regex", "rule", "sequence", "choice", "repeat"]
    text: str = ""
    parts: list["_Node"] = field(default_factory=list)
    least: int = 0
    most: int | None = None
    has_no_expression: bool = False  # found out already


def lark_of(grammar: str) -> str:
    """The grammar in Lark's notation, as llguidance reads it.

    Raises:
        GrammarError: for a GBNF grammar that is malformed, nested too deeply, or too large as Lark.
    """
    if _LARK.search(grammar):
        return grammar
    try:
        rules = _Parser(grammar).parse()
        return _Writer(rules).write()
    except RecursionError:
        raise GrammarError("its rules refer to one another too deeply") from None


class _Parser:
    """Recursive descent over GBNF: rules of alternatives of sequences."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def parse(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            name = self._match(_NAME, "the name of a rule")[0]
            self._skip(_SPACE)
            self._expect("::=")
            self._skip(_SPACE_AND_LINES)
            rules[name] = self._choice(0)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._error("an element of a rule, or the end of the line,")
            self._skip(_SPACE_AND_LINES)
        if "root" not in rules:
            raise GrammarError("it has no rule named root")
        return rules

    def _choice(self, depth: int) -> _Node:
        options = [self._sequence(depth)]
        while self._text.startswith("|", self._at):
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else _Node("choice", parts=options)

    def _sequence(self, depth: int) -> _Node:
        space = _SPACE_AND_LINES if depth else _SPACE
        parts: list[_Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)\r\n":
            part = self._element(depth)
            self._skip(space)
            while (counts := self._counts()) is not None:
                part = _Node("repeat", parts=[part], least=counts[0], most=counts[1])
                self._skip(space)
            parts.append(part)
        return parts[0] if len(parts) == 1 else _Node("sequence", parts=parts)

    def _element(self, depth: int) -> _Node:
        char = self._text[self._at]
        if char == "(":
            if depth == _MAX_NESTING:
                raise GrammarError(f"its brackets are nested deeper than {_MAX_NESTING} levels")
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            inner = self._choice(depth + 1)
            self._expect(")")
            return inner
        if char == '"':
            return _Node("regex", self._literal())
        if char == "[":
            return _Node("regex", self._class())
        if char == ".":
            self._at += 1
            return _Node("regex", _class_regex([(0, _LAST_CODE_POINT)], negated=False))
        return _Node("rule", self._match(_NAME, "an element of a rule")[0])

    def _literal(self) -> str:
        self._at += 1
        chars = []
        while not self._text.startswith('"', self._at):
            chars.append(_escaped(self._char()))
        self._at += 1
        return "".join(chars)

    def _class(self) -> str:
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while not self._text.startswith("]", self._at):
            first = last = ord(self._char())
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                last = ord(self._char())
            if last < first:
                raise self._error("a range that begins before it ends")
            ranges.append((first, last))
        self._at += 1
        return _class_regex(ranges, negated=negated)

    def _char(self) -> str:
        if self._at >= len(self._text):
            raise self._error("the end of a string or of a class of characters")
        char = self._text[self._at]
        self._at += 1
        if char != "\\":
            return char
        if code := _CODE_POINT.match(self._text, self._at):
            number = int(code[1] or code[2] or code[3], 16)
            if number > _LAST_CODE_POINT or 0xD800 <= number <= 0xDFFF:
                raise self._error("a character")
            self._at = code.end()
            return chr(number)
        escape = _ESCAPES.get(self._text[self._at : self._at + 1])
        if escape is None:
            raise self._error("an escape that GBNF has")
        self._at += 1
        return escape

    def _counts(self) -> tuple[int, int | None] | None:
        char = self._text[self._at : self._at + 1]
        if char in _SUFFIXES:
            self._at += 1
            return _SUFFIXES[char]
        if char != "{":
            return None
        counts = self._match(_REPEAT, "{m}, {m,} or {m,n}")
        least = int(counts[1])
        most = least if counts[2] is None else None if counts[3] is None else int(counts[3])
        if most is not None and most < least:
            raise self._error("a repetition whose most is not below its least")
        return least, most

    def _skip(self, pattern: re.Pattern[str]) -> None:
        skipped = pattern.match(self._text, self._at)
        assert skipped is not None  # each of them matches nothing too
        self._at = skipped.end()

    def _match(self, pattern: re.Pattern[str], wanted: str) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._error(wanted)
        self._at = found.end()
        return found

    def _expect(self, text: str) -> None:
        if not self._text.startswith(text, self._at):
            raise self._error(text)
        self._at += len(text)

    def _error(self, wanted: str) -> GrammarError:
        line = self._text.count("\n", 0, self._at) + 1
        found = self._text[self._at : self._at + 20]
        return GrammarError(f"line {line} should have {wanted} where it {'has ' + repr(found) if found else 'ends'}")


class _Writer:
    """Lark out of the rules: what is regular as an expression in one piece, the rest as rules."""

    def __init__(self, rules: dict[str, _Node]) -> None:
        self._rules = rules
        self._expressions: dict[str, str | None] = {}  # rule -> its regular expression, if it has one
        self._open: set[str] = set()
        self._size = 0  # of the expressions so far
        self._names: dict[str, str] = {"root": "start"}  # of the rules that are written out
        self._unwritten = ["root"]

    def write(self) -> str:
        lines = []
        while self._unwritten:
            name = self._unwritten.pop()
            lines.append(f"{self._names[name]}: {self._lark(self._rules[name])}")
        return "\n".join(lines) + "\n"

    def _expression_of_rule(self, name: str) -> str | None:
        if name not in self._rules:
            raise GrammarError(f"the rule {name!r} is used and not defined")
        if name not in self._expressions:
            if name in self._open:
                return None  # it leads back to itself
            self._open.add(name)
            expression = self._expression(self._rules[name])
            self._open.discard(name)
            self._expressions[name] = expression
        return self._expressions[name]

    def _expression(self, node: _Node) -> str | None:
        """The regular expression of a node; None: it is not regular, or too long for one."""
        if node.kind == "regex":
            return node.text
        if node.has_no_expression:
            return None
        match node.kind:
            case "rule":
                expression = self._expression_of_rule(node.text)
            case "repeat":
                inner = self._expression(node.parts[0])
                if node.most == 0:  # of whatever it is, also of a rule that leads back here
                    return ""
                expression = None if inner is None else f"(?:{inner}){_counts_text(node)}"
            case _:
                parts = self._expressions_of(node.parts)
                joined = "" if parts is None else ("" if node.kind == "sequence" else "|").join(parts)
                expression = None if parts is None else joined if node.kind == "sequence" else f"(?:{joined})"
        if expression is None or len(expression) > _MAX_EXPRESSION:
            node.has_no_expression = True
            return None
        return expression

    def _expressions_of(self, nodes: list[_Node]) -> list[str] | None:
        """One for each; None: there is not, or they are too long together."""
        expressions: list[str] = []
        length = 0
        for node in nodes:
            expression = self._expression(node)
            if expression is None or (length := length + len(expression)) > _MAX_EXPRESSION:
                return None
            expressions.append(expression)
        return expressions

    def _lark(self, node: _Node) -> str:
        expression = self._expression(node)
        if expression is not None:
            self._size += len(expression)
            if self._size > _MAX_LARK:
                raise GrammarError("it is too large once its rules are put into one another")
            return f"/{expression}/" if expression else '""'
        if node.kind == "rule":
            if node.text not in self._names:
                self._names[node.text] = f"rule_{len(self._names)}"
                self._unwritten.append(node.text)
            return self._names[node.text]
        if node.kind == "repeat":
            return f"({self._lark(node.parts[0])}){_counts_text(node)}"
        if node.kind == "choice":
            return "(" + " | ".join(self._lark(part) for part in node.parts) + ")"
        return " ".join(self._lark(run) for run in self._runs(node.parts))

    def _runs(self, parts: list[_Node]) -> Iterator[_Node]:
        """Neighbours that are regular, put together: one lexeme gives nothing away to the next."""
        run = ""
        for part in parts:
            expression = self._expression(part)
            if expression is not None and len(run) <= _MAX_LARK:
                run += expression
                continue
            if run:
                yield _Node("regex", run)
            yield part
            run = ""
        if run:
            yield _Node("regex", run)


def _counts_text(node: _Node) -> str:
    for suffix, counts in _SUFFIXES.items():
        if counts == (node.least, node.most):
            return suffix
    return f"{{{node.least},{'' if node.most is None else node.most}}}"


def _escaped(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}"


def _class_regex(ranges: list[tuple[int, int]], *, negated: bool) -> str:
    if not ranges:  # nothing, or anything
        ranges, negated = [(0, _LAST_CODE_POINT)], not negated
    inside = "".join(
        f"\\x{{{first:X}}}" if first == last else f"\\x{{{first:X}}}-\\x{{{last:X}}}" for first, last in ranges
    )
    return f"[{'^' if negated else ''}{inside}]"
