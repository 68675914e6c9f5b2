"""The fields of a chat that tell the model of functions, and the calls of its history. Knows the shape of the API only.

The types' `for_template` is what chat templates expect, which is the API's form but for arguments: an object, not text.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from server.json_values import MAX_DEPTH, is_within, read_object
from server.protocol.field_types import invalid

MAX_TOOLS = 512
MAX_TOOL_CALLS = 512  # of one message
MAX_DESCRIPTION = 64 << 10  # characters
MAX_ARGUMENTS = 8 << 20  # characters
MAX_CALL_ID = 256  # characters
_FUNCTION_NAME = r"^[a-zA-Z0-9_.:/-]{1,128}$"

_CONFIG = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)
FunctionName = Annotated[str, Field(pattern=_FUNCTION_NAME)]


def _check_parameters(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    if not is_within(schema, MAX_DEPTH):
        raise invalid(f"the schema of a function's arguments must not be nested deeper than {MAX_DEPTH} levels")
    try:
        json.dumps(schema, allow_nan=False)
    except ValueError:
        raise invalid("the schema of a function's arguments must hold no number that JSON does not have") from None
    return schema


class FunctionDefinition(BaseModel):
    """A function that the model may call."""

    model_config = _CONFIG

    name: FunctionName
    description: str | None = Field(None, max_length=MAX_DESCRIPTION)
    parameters: Annotated[dict[str, Any] | None, AfterValidator(_check_parameters)] = Field(
        None, description="JSON schema of an object; absent: no parameters."
    )
    strict: bool | None = Field(None, description="The arguments always satisfy the schema, even if `auto` chose.")

    def for_template(self) -> dict[str, Any]:
        """As the caller wrote it, but for what only concerns this server."""
        return {name: value for name, value in self.model_dump(exclude_none=True).items() if name != "strict"}


class Tool(BaseModel):
    """A function; no other kind of tool is known here."""

    model_config = _CONFIG

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return {**self.model_dump(exclude={"function"}), "function": self.function.for_template()}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether functions are to be called, and which ones may be."""

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] | None = None  # None: all
    is_named: bool = False  # one call of the one function


def _parse_tool_choice(value: object) -> object:
    if value is None or isinstance(value, ToolChoice):
        return value
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    if isinstance(value, dict) and value.get("type") == "function" and set(value) == {"type", "function"}:
        return ToolChoice("required", (_name_of(value, "tool_choice"),), is_named=True)
    if isinstance(value, dict) and value.get("type") == "allowed_tools" and set(value) == {"type", "allowed_tools"}:
        return _parse_allowed_tools(value["allowed_tools"])
    raise invalid(
        'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": "..."}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": "...", "tools": [...]}}'
    )


def _parse_allowed_tools(value: object) -> ToolChoice:
    if not isinstance(value, dict) or set(value) != {"mode", "tools"}:
        raise invalid("tool_choice.allowed_tools must have a mode and tools")
    mode, tools = value["mode"], value["tools"]
    if mode not in ("auto", "required"):
        raise invalid('tool_choice.allowed_tools.mode must be "auto" or "required"')
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        raise invalid(f"tool_choice.allowed_tools.tools must hold 1 to {MAX_TOOLS} tools")
    names = tuple(_name_of(tool, f"tool_choice.allowed_tools.tools[{i}]") for i, tool in enumerate(tools))
    return ToolChoice(mode, names)


def _name_of(tool: object, field: str) -> str:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid(f'{field} must be of the form {{"type": "function", "function": {{"name": "..."}}}}')
    return name


_NAME_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_ALLOWED_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": _NAME_SCHEMA, "minItems": 1, "maxItems": MAX_TOOLS},
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
ToolChoiceField = Annotated[
    ToolChoice | None,
    BeforeValidator(_parse_tool_choice),
    WithJsonSchema(
        {"anyOf": [{"enum": ["none", "auto", "required"]}, _NAME_SCHEMA, _ALLOWED_SCHEMA, {"type": "null"}]}
    ),
]


def _parse_arguments(text: object) -> dict[str, Any]:
    """What the text of arguments means. No text means no arguments: some servers send none."""
    if not isinstance(text, str):
        raise invalid("arguments must be a string that holds a JSON object")
    if len(text) > MAX_ARGUMENTS:
        raise invalid(f"arguments must have at most {MAX_ARGUMENTS} characters")
    try:
        return read_object(text or "{}")
    except ValueError as error:
        raise invalid(f"arguments {error}") from None


_ARGUMENTS_SCHEMA = {"type": "string", "maxLength": MAX_ARGUMENTS, "description": "The text of a JSON object."}


class CalledFunction(BaseModel):
    """What the model called."""

    model_config = _CONFIG

    name: FunctionName
    arguments: Annotated[dict[str, Any], PlainValidator(_parse_arguments), WithJsonSchema(_ARGUMENTS_SCHEMA)]


class MessageToolCall(BaseModel):
    """A call that the model made earlier."""

    model_config = _CONFIG

    id: str = Field(min_length=1, max_length=MAX_CALL_ID)
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}

    def ignored_fields(self) -> list[str]:
        """Names of the fields that nobody knows; `index` numbers the pieces of a stream, and some clients keep it."""
        names = [name for name in self.model_extra or {} if name != "index"]
        return names + [f"function.{name}" for name in self.function.model_extra or {}]
