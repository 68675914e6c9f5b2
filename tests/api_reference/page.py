"""Writes docs/api.md from the decisions, and from the types of the requests for what is not OpenAI's."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.fields import GenerationFields, RequestFields
from server.protocol.messages_api import MessagesRequest
from tests.api_reference.tables import ANSWERS, REQUESTS, Table
from tests.data_files import openai_fields

PATH = Path(__file__).parents[2] / "docs" / "api.md"
_HEAD = """# The API, field by field

This page is written by `python -m tests.api_reference`, and `tests/server/test_api_reference.py` tries its verdicts.
It lists the fields of OpenAI's API description 2.3.0 for the endpoints that are served, then the fields of vLLM and
llama.cpp that are taken besides. `/docs` and `/openapi.json` describe the same bodies for programs.

- **honoured**: it does what OpenAI's description says, within the limits that are noted.
- **no effect**: it is checked and accepted, and changes no answer.
- **refused**: 400, and `param` names the field. null is the same as absent everywhere.
- A field that nobody knows is ignored, and the header `x-octavo-ignored-fields` names it.

In the tables `a.b` is b inside of a, `a[]` each of a list, `a[x]` and `a(x)` where `type` or `role` is x. A field that
is refused, or absent from answers, stands for all that is in it.
"""
_TITLES = {
    "CreateCompletionRequest": "`POST /v1/completions`",
    "CreateChatCompletionRequest": "`POST /v1/chat/completions`",
    "CreateEmbeddingRequest": "`POST /v1/embeddings`",
    "CreateResponse": "`POST /v1/responses`",
    "TokenCountsBody": "`POST /v1/responses/input_tokens`",
    "CreateCompletionResponse": "Answers of `/v1/completions`, whole and as chunks",
    "CreateChatCompletionResponse": "Answers of `/v1/chat/completions`",
    "CreateChatCompletionStreamResponse": "Chunks of `/v1/chat/completions`",
    "ListModelsResponse": "Answers of `GET /v1/models`; `GET /v1/models/{model}` is one of `data`",
    "CreateEmbeddingResponse": "Answers of `/v1/embeddings`",
    "Response": "Answers of `/v1/responses`, and `response` in its events",
    "TokenCountsResource": "Answers of `/v1/responses/input_tokens`",
}
# Title, type, and the schema whose fields have a table already.
_EXTENSIONS: tuple[tuple[str, type[RequestFields], str], ...] = (
    ("Completions and chats", GenerationFields, "CreateChatCompletionRequest"),
    ("Completions", CompletionRequest, "CreateCompletionRequest"),
    ("Chats", ChatCompletionRequest, "CreateChatCompletionRequest"),
    ("Embeddings", EmbeddingRequest, "CreateEmbeddingRequest"),
)


def page() -> str:
    """The whole page."""
    parts = [_HEAD, "## Requests\n", *map(_table, REQUESTS), "## Answers\n", *map(_table, ANSWERS), _extensions()]
    return "\n".join(parts)


def _table(table: Table) -> str:
    rows: dict[str, str] = {}
    for field in openai_fields()[table.schema]:
        found = table.of(field)
        assert found is not None, f"{table.schema} has no verdict on {field}"
        place, decision = found
        name = place.rstrip("*") if decision.verdict in ("refused", "absent") else field
        rows.setdefault(name, f"| `{name.replace('|', chr(92) + '|')}` | {decision.verdict} | {decision.note} |")
    return "\n".join([f"### {_TITLES[table.schema]}\n", "| field | | |", "|---|---|---|", *rows.values(), ""])


def _extensions() -> str:
    lines = [
        "## Fields beyond OpenAI's",
        "",
        "Those of vLLM and llama.cpp. `/v1/responses` and `/v1/messages` take the sampling fields among them too.",
        "",
    ]
    for title, model, schema in _EXTENSIONS:
        described = {field for field in openai_fields()[schema] if "." not in field}
        shared = GenerationFields.model_fields.keys() if model is not GenerationFields else frozenset()
        lines += [f"### {title}\n", *_fields_of(model, described | shared)]
    lines += ["## Anthropic's `POST /v1/messages`", "", *_fields_of(MessagesRequest, frozenset())]
    return "\n".join(lines)


def _fields_of(model: type[RequestFields], told: Collection[str]) -> list[str]:
    """A table of a type's fields without those that were told of, and what it refuses."""
    properties = model.model_json_schema(by_alias=True)["properties"]
    rows = [
        f"| `{name}` | {_range_of(schema)} | {schema.get('description', '')} |"
        for name, schema in properties.items()
        if name not in told
    ]
    refused = sorted(set(model.neutral) - set(told) - _neutral_of_parent(model))
    names = ", ".join(f"`{name}`" for name in refused)
    end = [f"Refused by name, but where they would change nothing: {names}.", ""] if refused else []
    return ["| field | range | |", "|---|---|---|", *rows, "", *end]


def _neutral_of_parent(model: type[RequestFields]) -> frozenset[str]:
    is_generation = issubclass(model, GenerationFields) and model is not GenerationFields
    return frozenset(GenerationFields.neutral) if is_generation else frozenset()


def _range_of(schema: dict[str, Any]) -> str:
    """Type and bounds in a few words."""
    alternatives = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    return " or ".join(dict.fromkeys(_type_of(part) for part in alternatives))


def _type_of(schema: dict[str, Any]) -> str:
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    low, high = schema.get("minimum"), schema.get("maximum")
    if "$ref" in schema:
        return "object"
    kinds = schema.get("type", "object")
    kind = kinds if isinstance(kinds, str) else " or ".join(kind for kind in kinds if kind != "null")
    if low is None and high is None:
        return kind
    is_open = high is None or high >= 2**31 - 1
    return f"{kind}, {low} or more" if is_open else f"{kind}, {low} to {high}"
