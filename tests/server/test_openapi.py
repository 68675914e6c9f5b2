"""schemathesis over our own OpenAPI description: whatever fits it or does not is answered as it says, without 5xx."""

import copy
import json
from collections.abc import Iterator

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from msgspec.structs import replace
from schemathesis import APIOperation, Case, GenerationMode, Response, checks
from schemathesis.core.failures import Failure, FailureGroup

from scheduler.output import SequenceFailure
from server.dashboard.paths import DASHBOARD_PATH
from server.tool_parsers.formats import HERMES
from tests.server.chat_templates import QWEN_TOOLS
from tests.server.doubles import FakeEngine, byte_tokenizer, client_of, make_app, says
from tests.server.example_bodies import BODIES
from tests.server.test_tool_parsers import write

MODEL = "byte-model"
APP = make_app(FakeEngine(bursts=True, chunks=(1, 3)))
NUM_EXAMPLES = 10
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


def _description(app: FastAPI) -> dict:
    """Our own, but that every request names the model that is served: else most are answered with 404."""
    description = copy.deepcopy(app.openapi())
    for path in description["paths"].values():
        for operation in path.values():
            content = operation.get("requestBody", {}).get("content", {})
            for media in content.values():
                for schema in _alternatives(media["schema"]):
                    if "model" in schema.get("properties", {}):
                        schema["properties"]["model"] = {"enum": [MODEL]}
    return description


def _alternatives(schema: dict) -> list[dict]:
    found = [schema]
    for key in ("anyOf", "oneOf", "allOf"):
        found += [inner for part in schema.get(key, []) for inner in _alternatives(part)]
    return found


def _operations(app: FastAPI) -> Iterator[APIOperation]:
    schema = schemathesis.openapi.from_dict(_description(app))
    schema.app = app
    for result in schema.get_all_operations():
        yield result.ok()


def _has_body(operation: APIOperation) -> bool:
    return operation.method == "post"


OPERATIONS = list(_operations(APP))


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("operation", [o for o in OPERATIONS if _has_body(o)], ids=lambda operation: operation.label)
def test_bodies_are_answered_as_described(operation: APIOperation, mode: GenerationMode):
    @settings(
        max_examples=NUM_EXAMPLES, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Case) -> None:
        case.validate_response(case.call(), checks=CHECKS)

    check()


@pytest.mark.parametrize(
    "operation", [o for o in OPERATIONS if not _has_body(o)], ids=lambda operation: operation.label
)
def test_other_methods_are_answered_as_described(operation: APIOperation):
    path = {parameter.name: MODEL for parameter in operation.path_parameters}
    for parameters in [path, dict.fromkeys(path, "not/served?")] if path else [{}]:
        case = operation.Case(path_parameters=parameters)
        case.validate_response(case.call(), checks=CHECKS)


STREAM = "text/event-stream"
STREAMING = [o.path for o in OPERATIONS if STREAM in o.definition.raw["responses"]["200"]["content"]]
NOT_STREAMED = ("best_of", "prompt_logprobs", "use_beam_search")  # refused with stream: true
STREAMED = [
    (path, {**{name: value for name, value in body.items() if name not in NOT_STREAMED}, "stream": True})
    for path in STREAMING
    for body in BODIES[path]
]
CALL = "See:\n" + write(HERMES, [("get_weather", '{"city": "Oslo"}')])
FAILURES = {
    "engine dies": {"dies_after": 2},
    "request at fault": {"failure": SequenceFailure("The format takes too much.", "format")},
    "server at fault": {"failure": SequenceFailure("Secret.")},
}


def _streamed(path: str, body: dict, *, text: str = "abcdef", **engine_state: object) -> tuple[Case, Response]:
    """A request and its answer, by an engine that says `text` and has room for the descriptions of tools."""
    engine = FakeEngine(says(text))
    assert engine.info is not None
    engine.info = replace(engine.info, max_model_len=4096)
    for name, value in engine_state.items():
        setattr(engine, name, value)
    app = make_app(engine, tokenizer=byte_tokenizer(QWEN_TOOLS))
    (operation,) = [operation for operation in _operations(app) if operation.path == path and _has_body(operation)]
    case = operation.Case(body=body, media_type="application/json")
    response = case.call()
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == [f"{STREAM}; charset=utf-8"]
    return case, response


def _last_data(response: Response) -> str:
    *_, last, end = response.text.split("\n\n")
    assert end == ""
    return last.partition("data: ")[2]


def test_streaming_routes_are_described():
    assert set(STREAMING) == {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}


@pytest.mark.parametrize(("path", "body"), STREAMED)
def test_streams_are_as_described(path: str, body: dict):
    case, response = _streamed(path, body)
    last = _last_data(response)
    assert last == "[DONE]" or json.loads(last)["type"] in ("response.incomplete", "message_stop")
    case.validate_response(response, checks=CHECKS)


@pytest.mark.parametrize(
    ("path", "piece"),
    [
        ("/v1/chat/completions", '"tool_calls":[{'),
        ("/v1/responses", "event: response.function_call_arguments.delta"),
        ("/v1/messages", '"type":"input_json_delta"'),
    ],
)
def test_streamed_tool_calls_are_as_described(path: str, piece: str):
    body = next(body for route, body in STREAMED if route == path and "tools" in body)
    asked = {name: value for name, value in body.items() if name not in ("tool_choice", "stop", "stop_token_ids")}
    limits = {name: 200 for name in body if name in ("max_tokens", "max_completion_tokens", "max_output_tokens")}
    case, response = _streamed(path, {**asked, **limits}, text=CALL)
    assert piece in response.text
    case.validate_response(response, checks=CHECKS)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("path", STREAMING)
def test_streams_that_fail_are_as_described(path: str, failure: str):
    case, response = _streamed(path, {**BODIES[path][0], "stream": True}, **FAILURES[failure])
    last = json.loads(_last_data(response))
    assert last["response"]["error"] if path == "/v1/responses" else last["error"]
    case.validate_response(response, checks=CHECKS)


@pytest.mark.parametrize(
    ("true", "false"),
    [(b'"id":', b'"no":'), (b"data: ", b"event: other\ndata: "), (b"data: {", b"data: ["), (b"data: ", b"data: x")],
)
@pytest.mark.parametrize("path", STREAMING)
def test_other_streams_are_not_as_described(path: str, true: bytes, false: bytes):
    case, response = _streamed(path, {**BODIES[path][0], "stream": True})
    response.content = response.content.replace(true, false)
    with pytest.raises((Failure, FailureGroup), match="SSE event"):
        case.validate_response(response, checks=[checks.response_schema_conformance])


def test_every_route_is_described():
    described = {(path, method.upper()) for path, item in APP.openapi()["paths"].items() for method in item}
    assert described >= {("/v1/completions", "POST"), ("/v1/models", "GET"), ("/version", "GET")}
    routers = [route.original_router for route in APP.routes if hasattr(route, "original_router")]
    served = {
        (route.path.replace(":path", ""), method)
        for router in routers
        for route in router.routes
        if not route.path.startswith(DASHBOARD_PATH)  # the pages' own business
        for method in route.methods
    }
    assert ("/tokenize", "POST") in served
    assert served == described


async def test_a_route_is_described_as_open_where_it_is():
    app = make_app(FakeEngine(), api_key=("a",), admin_api_key="b")
    async with client_of(app) as client:
        for path, item in app.openapi()["paths"].items():
            for method, operation in item.items():
                answer = await client.request(method, path)
                assert (answer.status_code != 401) == (operation["security"] == []), path
                assert ("401" in operation["responses"]) == (operation["security"] != []), path
