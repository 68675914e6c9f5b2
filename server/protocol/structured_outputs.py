"""The fields that ask for an answer of a certain form, in every spelling that clients use, and what they mean.

OpenAI's `response_format`; vLLM's `structured_outputs` and its older `guided_*`; llama.cpp's `grammar` and
`json_schema`. Checks their shape and size; whether a schema or grammar can be compiled, the engine says.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from scheduler.sampling_params import StructuredOutput
from server.errors import InvalidRequest
from server.json_values import MAX_DEPTH, is_within
from server.protocol.gbnf import GrammarError, lark_of

MAX_SCHEMA_BYTES = 128 << 10
MAX_REGEX_BYTES = 16 << 10
MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 1024
MAX_CHOICES_BYTES = 64 << 10  # of one request
MAX_WHITESPACE_BYTES = 256
_MAX_NAME = 64
_MAX_DESCRIPTION = 64 << 10


def _check_schema(value: object) -> object:
    if value is not None and not isinstance(value, dict | bool):
        raise PydanticCustomError("invalid", "a JSON schema is an object, true or false")
    return value


def _check_schema_or_text(value: object) -> object:
    return value if isinstance(value, str) else _check_schema(value)


# Not a union of types: an error then names the field alone, and not a member of the union.
Schema = Annotated[Any, BeforeValidator(_check_schema), WithJsonSchema({"type": ["object", "boolean", "null"]})]
SchemaOrText = Annotated[
    Any, BeforeValidator(_check_schema_or_text), WithJsonSchema({"type": ["object", "boolean", "string", "null"]})
]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]


class JsonSchemaFormat(BaseModel):
    """The schema that an answer must satisfy, under a name that changes nothing."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True)

    name: str | None = Field(None, min_length=1, max_length=_MAX_NAME, pattern=r"^[a-zA-Z0-9_-]+$")
    description: str | None = Field(None, max_length=_MAX_DESCRIPTION)
    json_schema: Schema = Field(None, alias="schema", description="Absent: any JSON object.")
    strict: bool | None = Field(None, description="Either way the answer satisfies the schema.")


class ResponseFormat(BaseModel):
    """OpenAI's form; `schema` beside the type json_object is llama.cpp's."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    object_schema: Schema = Field(None, alias="schema")


class StructuredOutputs(BaseModel):
    """vLLM's form: exactly one of the first five."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True)

    json_value: SchemaOrText = Field(None, alias="json", description="A JSON schema, or its text.")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = Field(None, description="A Lark or a GBNF grammar.")
    json_object: bool | None = None
    whitespace_pattern: str | None = Field(None, description="A regular expression for what separates JSON's tokens.")
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None
    structural_tag: None = None


def structured_output_of(
    *,
    response_format: ResponseFormat | None = None,
    structured_outputs: StructuredOutputs | None = None,
    guided_json: SchemaOrText = None,
    guided_regex: str | None = None,
    guided_choice: list[str] | None = None,
    guided_grammar: str | None = None,
    guided_whitespace_pattern: str | None = None,
    grammar: str | None = None,
    json_schema: SchemaOrText = None,
) -> StructuredOutput | None:
    """What the fields of a request ask for; None: text of any form. Once a request: it reads a schema through.

    Raises:
        InvalidRequest: for more than one of them at once, and for one that is malformed, too large or too deep.
    """
    vllm = structured_outputs or StructuredOutputs.model_construct()
    given: list[tuple[str, str, Any]] = [
        ("json", "structured_outputs.json", vllm.json_value),
        ("regex", "structured_outputs.regex", vllm.regex),
        ("choice", "structured_outputs.choice", vllm.choice),
        ("grammar", "structured_outputs.grammar", vllm.grammar),
        ("json_object", "structured_outputs.json_object", vllm.json_object or None),
        ("json", "guided_json", guided_json),
        ("regex", "guided_regex", guided_regex),
        ("choice", "guided_choice", guided_choice),
        ("grammar", "guided_grammar", guided_grammar),
        ("grammar", "grammar", grammar or None),
        ("json", "json_schema", json_schema),
        *_of_response_format(response_format),
    ]
    asked = [(kind, param, value) for kind, param, value in given if value is not None]
    if not asked:
        if structured_outputs is not None:
            raise InvalidRequest(
                "structured_outputs needs one of json, regex, choice, grammar and json_object.", "structured_outputs"
            )
        if guided_whitespace_pattern is not None:
            raise InvalidRequest("guided_whitespace_pattern needs guided_json.", "guided_whitespace_pattern")
        return None
    if len(asked) > 1:
        names = " and ".join(param for _, param, _ in asked[:2])
        raise InvalidRequest(f"{names} exclude each other: an answer has one form.", asked[1][1])
    [(kind, param, value)] = asked
    whitespace = _whitespace(vllm, guided_whitespace_pattern, is_json=kind.startswith("json"))
    return _structured_output(kind, param, value, whitespace)


def _of_response_format(response_format: ResponseFormat | None) -> Iterator[tuple[str, str, Any]]:
    if response_format is None:
        return
    described, plain = response_format.json_schema, response_format.object_schema
    if described is not None and response_format.type != "json_schema":
        raise InvalidRequest(
            "response_format.json_schema needs response_format.type to be json_schema.", "response_format.json_schema"
        )
    if plain is not None and response_format.type != "json_object":
        raise InvalidRequest(
            "response_format.schema needs response_format.type to be json_object.", "response_format.schema"
        )
    if response_format.type == "json_schema":
        if described is None:
            raise InvalidRequest(
                "response_format.json_schema is required for the type json_schema.", "response_format.json_schema"
            )
        if described.json_schema is not None:
            yield "json", "response_format.json_schema.schema", described.json_schema
        else:
            yield "json_object", "response_format", True
    elif plain is not None:
        yield "json", "response_format.schema", plain
    elif response_format.type == "json_object":
        yield "json_object", "response_format", True


def _structured_output(kind: str, param: str, value: Any, whitespace: str | None) -> StructuredOutput:  # noqa: ANN401
    if kind == "json_object":
        return StructuredOutput("json_object", whitespace=whitespace, param=param)
    if kind == "json":
        return StructuredOutput("json_schema", _schema_text(value, param), whitespace, param)
    if kind == "choice":
        return StructuredOutput("choice", _choices_text(value, param), param=param)
    if not value:
        raise InvalidRequest(f"{param} is empty.", param)
    if kind == "regex":
        check_size(value, MAX_REGEX_BYTES, param)
        return StructuredOutput("regex", value, param=param)
    check_size(value, MAX_GRAMMAR_BYTES, param)
    try:
        return StructuredOutput("grammar", lark_of(value), param=param)
    except GrammarError as error:
        raise InvalidRequest(f"{param} cannot be read: {error}.", param) from None


def _whitespace(vllm: StructuredOutputs, guided: str | None, *, is_json: bool) -> str | None:
    pattern, param = vllm.whitespace_pattern, "structured_outputs.whitespace_pattern"
    if pattern is None:
        pattern, param = guided, "guided_whitespace_pattern"
    if pattern is not None:
        check_size(pattern, MAX_WHITESPACE_BYTES, param)
        if not is_json:
            raise InvalidRequest(f"{param} is for answers in JSON alone.", param)
    if vllm.disable_any_whitespace:
        if pattern:
            raise InvalidRequest(f"{param} and disable_any_whitespace exclude each other.", param)
        return ""
    return pattern


def _schema_text(schema: SchemaOrText, param: str) -> str:
    """The text of a schema, with the order of its properties, in which they are answered."""
    if isinstance(schema, str):
        check_size(schema, MAX_SCHEMA_BYTES, param)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{param} is not valid JSON: {str(error)[:200]}.", param) from None
        if not isinstance(schema, dict | bool):
            raise InvalidRequest(f"{param} is not a JSON schema: that is an object, true or false.", param)
    if not is_within(schema, MAX_DEPTH):
        raise InvalidRequest(f"{param} is nested deeper than {MAX_DEPTH} levels.", param)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise InvalidRequest(f"{param} holds a number that JSON does not have.", param) from None
    check_size(text, MAX_SCHEMA_BYTES, param)
    return text


def _choices_text(choices: list[str], param: str) -> str:
    if not choices or len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"{param} must hold 1 to {MAX_CHOICES} strings, not {len(choices)}.", param)
    if not all(choices):
        raise InvalidRequest(f"{param} holds an empty string, which no answer is.", param)
    text = json.dumps(choices, ensure_ascii=False)
    check_size(text, MAX_CHOICES_BYTES, param)
    return text


def check_size(text: str, max_bytes: int, param: str) -> None:
    """Refuse a text that is too long, or that is not Unicode. Raises InvalidRequest."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{param} holds half of a surrogate pair, which is not a character.", param) from None
    if num_bytes > max_bytes:
        raise InvalidRequest(f"{param} takes {num_bytes} bytes; it may take {max_bytes}.", param)
