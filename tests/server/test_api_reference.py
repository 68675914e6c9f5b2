"""docs/api.md says what the server does: each verdict on a field of OpenAI's description is tried on the server."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from tests.api_reference.page import PATH, page
from tests.api_reference.paths import body_with, param_of, paths_of
from tests.api_reference.tables import ANSWERS, REQUESTS, Table
from tests.data_files import openai_fields, openai_response_events
from tests.server.doubles import FakeEngine, client_of, make_app, says
from tests.server.example_bodies import BODIES

ALL_TABLES = [*REQUESTS, *ANSWERS]
# Fields that only some models can honour: test_completions has one.
NEEDS_ANOTHER_MODEL = {"suffix"}
# What an object must have besides the field that is refused.
SIBLINGS = {"tools[function]": {"name": "f"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call>'


def schema_of(table: Table) -> str:
    return table.schema


def engine_that(says_what: str) -> FakeEngine:
    engine = FakeEngine(says(says_what), bursts=True, chunks=(8,))
    engine.info = replace(engine.info, max_model_len=2048)
    return engine


async def post(route: str, body: dict[str, Any], text: str = "Hello."):
    async with client_of(make_app(engine_that(text))) as client:
        return await client.post(route, content=json.dumps(body))


@pytest.mark.parametrize("table", ALL_TABLES, ids=schema_of)
def test_every_field_of_the_description_has_a_verdict(table: Table):
    assert [field for field in openai_fields()[table.schema] if table.of(field) is None] == []


@pytest.mark.parametrize("table", ALL_TABLES, ids=schema_of)
def test_every_verdict_is_on_a_field(table: Table):
    used = {found[0] for field in openai_fields()[table.schema] if (found := table.of(field))}
    shared = ["input", "tools", "tool_choice", "text", "reasoning", "conversation", "usage", "stream_options"]
    unused = [place for place in table.decisions if place not in used and place != "*"]
    assert [place for place in unused if not place.startswith(tuple(shared))] == []


@pytest.mark.parametrize("table", REQUESTS, ids=schema_of)
def test_what_is_taken_stands_in_an_example(table: Table):
    """test_fuzz holds that the examples are answered, and that no field of theirs is reported as unknown."""
    shown = {place for body in BODIES[table.route] for place in paths_of(body)}
    taken = [f for f in openai_fields()[table.schema] if table.of(f)[1].verdict in ("honoured", "no effect")]
    assert [field for field in taken if field not in shown | NEEDS_ANOTHER_MODEL] == []


def refused_fields() -> Iterator[tuple[str, str, object]]:
    for table in REQUESTS:
        for field in openai_fields()[table.schema]:
            place, decision = table.of(field)
            if decision.verdict == "refused" and field == place.rstrip("*"):
                yield table.route, field, decision.probe


@pytest.mark.parametrize(("route", "field", "probe"), list(refused_fields()))
async def test_what_is_refused_is_refused_by_name(route: str, field: str, probe: object):
    parent, _, name = field.rpartition(".")
    broken = body_with(parent, {**SIBLINGS[parent], name: probe}) if parent in SIBLINGS else body_with(field, probe)
    body = copy.deepcopy(BODIES[route][0]) | broken
    response = await post(route, body)
    assert response.status_code == 400, response.text
    param = response.json()["error"]["param"]
    assert param, response.text
    assert param_of(field).startswith(param) or param.startswith(param_of(field)), response.text


async def answers_of(table: Table) -> Iterator[dict[str, Any]]:
    """Answers to every example, of a model that talks and of one that calls a function."""
    found: list[dict[str, Any]] = []
    for text in ("Hello.", CALL):
        for body in BODIES.get(table.route, [None]):
            if body is None:
                async with client_of(make_app(FakeEngine())) as client:
                    found.append((await client.get(table.route)).json())
                continue
            for stream in (False, True) if "stream" in json.dumps(BODIES[table.route]) else (False,):
                found += await _answer(table.route, body, text, stream=stream)
                unbounded = {name: value for name, value in body.items() if not name.startswith("max_")}
                found += await _answer(table.route, unbounded, text, stream=stream)
    return [answer for answer in found if _is_of(table.schema, answer)]


async def _answer(route: str, body: dict[str, Any], text: str, *, stream: bool) -> list[dict[str, Any]]:
    if stream and ("best_of" in body or "prompt_logprobs" in body):
        return []
    body = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    if stream:
        body |= {"stream": True, "stream_options": {"include_obfuscation": True}}
    if route != "/v1/responses" and stream:
        body["stream_options"]["include_usage"] = True
    response = await post(route, body, text)
    assert response.status_code == 200, response.text
    if not stream:
        return [response.json()]
    events = [event[event.index("data: ") + 6 :] for event in response.text.removesuffix("\n\n").split("\n\n")]
    return [json.loads(event) for event in events if event != "[DONE]"]


def _is_of(schema: str, answer: dict[str, Any]) -> bool:
    kinds = {"CreateChatCompletionResponse": "chat.completion", "Response": "response"}
    kinds["CreateChatCompletionStreamResponse"] = "chat.completion.chunk"
    return schema not in kinds or answer.get("object") == kinds[schema]


@pytest.mark.parametrize("table", ANSWERS, ids=schema_of)
async def test_answers_have_what_they_are_said_to_have(table: Table):
    shown = {place for answer in await answers_of(table) for place in paths_of(answer)}
    assert shown
    verdicts = {field: table.of(field)[1].verdict for field in openai_fields()[table.schema]}
    assert [field for field, verdict in verdicts.items() if (field in shown) != (verdict == "given")] == []


async def test_streams_of_responses_have_the_described_events():
    found: dict[str, set[str]] = {}
    for text in ("Hello.", CALL):
        for body in BODIES["/v1/responses"]:
            body = {name: value for name, value in body.items() if name != "max_output_tokens"}
            for event in await _answer("/v1/responses", body, text, stream=True):
                found.setdefault(event["type"], set()).update(event)
    described = openai_response_events()
    assert {"response.created", "response.completed", "response.function_call_arguments.delta"} <= found.keys()
    assert found.keys() <= described.keys()
    for event, fields in found.items():
        assert set(described[event]) - {"obfuscation", "agent"} <= fields, event


def test_the_page_is_as_it_is_written():
    assert PATH.read_text(encoding="utf-8") == page(), "run: python -m tests.api_reference"


def test_places_are_read_as_they_are_written():
    body = {"a": [{"type": "x", "b": 1}], "c": {"type": "y"}, "messages": [{"role": "user", "content": "z"}]}
    places = set(paths_of(body))
    assert {"a[]", "a[x]", "a[].b", "a[x].b", "c(y)", "messages[user].content"} - places == {"a[]"}
    assert body_with("messages[user].content[image_url].d", 1) == {
        "messages": [{"role": "user", "content": [{"type": "image_url", "d": 1}]}]
    }
    assert body_with("f(custom).a[].b", 2) == {"f": {"type": "custom", "a": [{"b": 2}]}}
    assert body_with("tools[web|web2]", "x") == {"tools": [{"type": "web"}]}
    assert param_of("messages[user].content[].b(c).d") == "messages[0].content[0].b.d"
