"""Completes what FastAPI says in `/openapi.json`: the answers, the errors and the keys of every route.

Bodies are described by the routes themselves (see routes/openapi.py). Serves nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from server.middleware import ADMIN_PATHS, HEALTH_PATHS, LIVENESS_PATH, takes_x_api_key
from server.protocol import messages_answers, models, request_reports, response_objects, responses, tokenization
from server.protocol.embeddings import Embedding, EmbeddingList
from server.protocol.messages_answers import MESSAGES_PATH, OVERLOADED, is_messages_path

_DESCRIPTION = (
    "OpenAI's completions, chat, responses and embeddings, Anthropic's messages, and the tokenisation of vLLM and "
    "llama.cpp. Each field of a request does what it says, or is refused with an error that names it."
)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a route answers with: structs, of which one is meant, or a media type with text."""

    whole: tuple[type[msgspec.Struct], ...] = ()
    events: tuple[type[msgspec.Struct], ...] = ()  # the data of a stream's events, those of its errors included
    text: str | None = None  # a media type


class ErrorDetails(msgspec.Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None  # the field at fault, in the way Python would reach it
    code: str | None


class Error(msgspec.Struct):
    """An answer that is not a success."""

    error: ErrorDetails


class MessagesErrorDetails(msgspec.Struct):
    """What went wrong."""

    type: str
    message: str


class MessagesError(msgspec.Struct, tag_field="type", tag="error"):
    """An answer that is not a success, in Anthropic's form."""

    error: MessagesErrorDetails


class Status(msgspec.Struct):
    """How the server is."""

    status: str


class Version(msgspec.Struct):
    """The version of the server."""

    version: str


_EMBEDDINGS = "/v1/embeddings"
_COMPLETION = _Answer((responses.Completion,), (responses.Completion, Error))
_STATUS = _Answer((Status,))
_TOKEN_COUNT = _Answer((messages_answers.TokenCount,))
_ANSWERS: Mapping[str, _Answer] = {
    "/v1/completions": _COMPLETION,
    "/v1/chat/completions": _Answer((responses.ChatCompletion,), (responses.ChatCompletionChunk, Error)),
    "/v1/responses": _Answer((response_objects.Response,), get_args(response_objects.ResponseEvent)),
    "/v1/responses/input_tokens": _Answer((response_objects.InputTokenCount,)),
    MESSAGES_PATH: _Answer((messages_answers.Message,), (*get_args(messages_answers.MessageEvent), MessagesError)),
    f"{MESSAGES_PATH}/count_tokens": _TOKEN_COUNT,
    _EMBEDDINGS: _Answer((EmbeddingList,)),
    "/v1/models": _Answer((models.ModelList, models.AnthropicModelPage)),
    "/v1/models/{model}": _Answer((models.ModelCard, models.AnthropicModel)),
    "/v1/requests/{id}": _Answer((request_reports.RequestDetails,)),
    "/tokenize": _Answer((tokenization.Tokenization,)),
    "/detokenize": _Answer((tokenization.Detokenization,)),
    "/version": _Answer((Version,)),
    "/metrics": _Answer(text="text/plain"),
    LIVENESS_PATH: _STATUS,
    "/health": _STATUS,
    "/health/ready": _STATUS,
}
# Fields whose contents are encoded before the rest of their struct, by what they hold.
_ENCODED: Mapping[type[msgspec.Struct], Mapping[str, Any]] = {
    responses.Completion: {"choices": list[responses.CompletionChoice]},
    responses.ChatCompletion: {"choices": list[responses.ChatChoice]},
    EmbeddingList: {"data": list[Embedding]},
    tokenization.Tokenization: {"tokens": list[int | tokenization.TokenPiece]},
}
_REFERENCE = "#/components/schemas/{name}"
_STATUSES = {
    "400": "The request is at fault; `param` names the field.",
    "401": "The key is missing or wrong.",
    "403": "The key does not open this route.",
    "404": "There is no such model, or no such request.",
    "413": "The body is too large.",
    "429": "There is no room for one more: come again after the seconds of Retry-After.",
    "500": "The server is at fault; its log says more.",
    "503": "The engine is loading, draining, lost or overloaded: come again after the seconds of Retry-After.",
    "504": "The answer was not complete in the time that it may take.",
}


def describe(app: FastAPI, *, needs_key: bool, has_admin_key: bool) -> None:
    """Let `app` describe itself whole, with the keys that it asks for."""

    @cache
    def description() -> dict[str, Any]:
        whole = get_openapi(
            title=app.title,
            version=app.version,
            description=_DESCRIPTION,
            routes=app.routes,
        )
        schemas, components = _answer_schemas()
        for path, item in whole["paths"].items():
            for operation in item.values():
                operation["responses"] = _responses(path, operation, schemas)
                operation["security"] = _security(path, needs_key=needs_key, has_admin_key=has_admin_key)
        whole["components"] = {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        }
        return whole

    app.openapi = description  # type: ignore[method-assign]


def _responses(path: str, operation: dict[str, Any], schemas: Mapping[type, dict[str, Any]]) -> dict[str, Any]:
    answer = _ANSWERS.get(path, _Answer())
    content: dict[str, Any] = {"application/json": {"schema": _any_of(answer.whole, schemas)}}
    if answer.text is not None:
        content = {answer.text: {"schema": {"type": "string"}}}
    if answer.events:
        content["text/event-stream"] = {"schema": _event(answer.events, schemas)}
    error = schemas[MessagesError if is_messages_path(path) else Error]
    found = {"200": {"description": "The answer.", "content": content}}
    if path == LIVENESS_PATH:
        return found
    without = set() if "requestBody" in operation else {"413", "429"}
    if not answer.events and path != _EMBEDDINGS:  # what no engine computes does not wait for it
        without.add("504")
    if "requestBody" not in operation and not operation.get("parameters"):
        without |= {"400", "404"}
    if path in HEALTH_PATHS:
        without |= {"401", "403"}
    for status in sorted(_STATUSES.keys() - without):
        schema = schemas[Status] if status == "503" and answer is _STATUS else error
        told = str(OVERLOADED) if status == "503" and is_messages_path(path) else status
        found[told] = {"description": _STATUSES[status], "content": {"application/json": {"schema": schema}}}
    return {**found, "default": {"description": "Another error.", "content": {"application/json": {"schema": error}}}}


def _event(kinds: tuple[type[msgspec.Struct], ...], schemas: Mapping[type, dict[str, Any]]) -> dict[str, Any]:
    """One event of a stream, as HTML's "Server-sent events" reads it: an event without a name is a `message`.

    Structs with a tag have it for the name of their event. The streams of the others end with [DONE].
    """
    events = []
    for kind in kinds:
        tag = kind.__struct_config__.tag
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schemas[kind]}
        name = {"const": "message" if tag is None else tag}
        required = ["data"] if tag is None else ["event", "data"]
        events.append({"type": "object", "properties": {"event": name, "data": data}, "required": required})
    if any(kind.__struct_config__.tag is None for kind in kinds):
        end = {"event": {"const": "message"}, "data": {"const": "[DONE]"}}
        events.append({"type": "object", "properties": end, "required": ["data"]})
    return {"description": "One of the events that are sent with stream: true.", "anyOf": events}


def _security(path: str, *, needs_key: bool, has_admin_key: bool) -> list[dict[str, list[str]]]:
    """Any one of these opens the route; none: it is open."""
    if path in HEALTH_PATHS or not (needs_key or (has_admin_key and path in ADMIN_PATHS)):
        return []
    return [{"bearer": []}, *([{"x-api-key": []}] if takes_x_api_key(path) else [])]


def _any_of(kinds: tuple[type, ...], schemas: Mapping[type, dict[str, Any]]) -> dict[str, Any]:
    found = [schemas[kind] for kind in kinds]
    return found[0] if len(found) == 1 else {"anyOf": found} if found else {}


def _answer_schemas() -> tuple[dict[type, dict[str, Any]], dict[str, Any]]:
    """A reference for each struct, and what the references lead to."""
    answered = [kind for answer in _ANSWERS.values() for kind in (*answer.whole, *answer.events)]
    kinds = list(dict.fromkeys([*answered, Error, MessagesError]))
    described = [_as_described(kind) for kind in kinds]
    schemas, components = msgspec.json.schema_components(described, ref_template=_REFERENCE)
    return dict(zip(kinds, schemas, strict=True)), components


def _as_described(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The struct as it reads once it is encoded."""
    if kind not in _ENCODED:
        return kind
    hints = get_type_hints(kind) | _ENCODED[kind]
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        default = () if field.required else (field.default,)
        fields.append((field.name, hints[field.name], *default))
    return msgspec.defstruct(kind.__name__, fields, namespace={"__doc__": kind.__doc__})
