"""The forms of tool calls that are known here: their names, how a template tells them apart, and their grammars.

A grammar is Lark as llguidance reads it, with `%json` for arguments; what it admits, the form's reader reads back.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scheduler.json_schema import JSON_ESCAPES, grammar_schema
from server.tool_parsers.reader import Markup, MarkupReader

ToolParserName = Literal["hermes", "llama3_json", "mistral"]

# As templates write JSON, and as models have seen it: a space after each colon and comma, and no other.
_JSON_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": JSON_ESCAPES,
}


@dataclass(frozen=True, slots=True)
class CallableFunction:
    """A function that an answer may call."""

    name: str
    parameters: dict[str, Any] | None  # JSON schema of an object; None: no parameters


@dataclass(frozen=True, slots=True)
class CallRules:
    """What an answer may hold."""

    functions: Sequence[CallableFunction]
    required: bool  # a call, and nothing but calls
    parallel: bool  # more than one
    content_schema: str | None = None  # JSON schema of what the answer is if it is no call; None: any text


@dataclass(frozen=True, slots=True)
class ToolCallForm:
    """One way of writing tool calls. Implements ToolCallFormat."""

    name: ToolParserName
    markup: Markup
    arguments_key: str = "arguments"
    separator: str | None = None  # Lark between one marked call and the next; None: there is no next
    listed: bool = False  # calls stand in a JSON list
    arguments_mark: str = ""  # between name and arguments, where the name comes first

    def reader(self, function_names: frozenset[str], *, calls_only: bool = False) -> MarkupReader:
        """For one answer of a model that was told of these functions."""
        return MarkupReader(self.markup, function_names, calls_only=calls_only)

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that tell calls apart. Where they are special tokens of the model, they must be seen too."""
        return tuple(filter(None, (self.markup.start, self.markup.end, "[ARGS]", "[CALL_ID]")))

    def grammar(self, rules: CallRules, special_ids: Mapping[str, int]) -> str:
        """The answers that `rules` admit. `special_ids` are the ids of those marks that are special tokens."""
        lines = _function_rules(rules.functions, *self._around_name(special_ids))
        mark = _lark_mark(self.markup.start, special_ids)
        body = "call"
        if self.listed:
            body = '"[" call (", " call)* "]"' if rules.parallel else '"[" call "]"'
        repeats = rules.parallel and self.separator is not None
        again = f" ({self.separator} marked)*" if repeats else ""
        if rules.required:
            return "\n".join([f"start: marked{again}", f"marked: {'' if self.markup.bare else mark} {body}", *lines])
        if rules.content_schema is not None:
            lines += [f"marked: {'' if self.markup.bare else mark} {body}", f"content: %json {rules.content_schema}"]
            return "\n".join([f"start: content | marked{again}", *lines])
        if self.markup.bare:  # text must not begin as a call does
            lines.append(r"TEXT: /([^{ \t\r\n](.|\n)*)?/")
            return "\n".join([f"start: TEXT | {body}", *lines])
        # Any text; but once it has the mark a call must follow.
        lines.append(r"TEXT: /(.|\n)*/")
        if self.markup.start in special_ids:
            lines.append(f"marked: TEXT {mark} {body}")
        else:
            lines += [f"marked: begin {body}", f"begin[lazy]: TEXT {mark}"]
        return "\n".join(["start: marked* TEXT" if repeats else "start: TEXT | marked", *lines])

    def _around_name(self, special_ids: Mapping[str, int]) -> tuple[str, str, str]:
        """What stands before a function's name, after it, and after its arguments, as Lark."""
        if self.arguments_mark:
            return '"', f'" {_lark_mark(self.arguments_mark, special_ids)}', ""
        before, after = ("\\n", f"\\n{self.markup.end}") if self.markup.end else ("", "")
        return f'"{before}{{\\"name\\": \\"', f'\\", \\"{self.arguments_key}\\": "', f'"}}{after}"'


def _function_rules(functions: Sequence[CallableFunction], before: str, after: str, closing: str) -> list[str]:
    names = [f"function_{index}" for index in range(len(functions))]
    rules = [f"call: {' | '.join(names)}"]
    for rule, function in zip(names, functions, strict=True):
        rules.append(f"{rule}: {before}{function.name}{after} {rule}_arguments {closing}")
        rules.append(f"{rule}_arguments: %json {json.dumps(arguments_schema(function.parameters))}")
    return rules


def _lark_mark(text: str, special_ids: Mapping[str, int]) -> str:
    """A mark as Lark: by its id where it is a special token, which no text can spell."""
    return f"<[{special_ids[text]}]>" if text in special_ids else json.dumps(text)


def arguments_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The schema that the arguments of a function satisfy. Raises SchemaError if no grammar can follow it."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False, "x-guidance": _JSON_STYLE}
    return {"type": "object", **grammar_schema(parameters), "x-guidance": _JSON_STYLE}


HERMES = ToolCallForm("hermes", Markup("<tool_call>", "</tool_call>"), separator=r'"\n"')
LLAMA3_JSON = ToolCallForm("llama3_json", Markup("<|python_tag|>", bare=True), "parameters")
_MISTRAL_MARKUP = Markup("[TOOL_CALLS]", name_first=True, short_ids=True)
MISTRAL = ToolCallForm("mistral", _MISTRAL_MARKUP, listed=True)
MISTRAL_NAME_FIRST = ToolCallForm("mistral", _MISTRAL_MARKUP, separator="", arguments_mark="[ARGS]")


def tool_call_form(template: str, name: ToolParserName | None) -> ToolCallForm | None:
    """The form that a model uses: the one of this name, or else the one that its template writes; None: unknown."""
    mistral = MISTRAL_NAME_FIRST if "[ARGS]" in template else MISTRAL
    if name is not None:
        return {"hermes": HERMES, "llama3_json": LLAMA3_JSON, "mistral": mistral}[name]
    if "[TOOL_CALLS]" in template:
        return mistral
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return HERMES
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return LLAMA3_JSON
    return None
