"""Every way in which a request for a message can be wrong, and what its sender is told, in Anthropic's shape."""

import anthropic
import pytest

from scheduler.output import SequenceFailure
from tests.server.doubles import FakeEngine, client_of, make_app, says
from tests.server.test_chat_tools import nested
from tests.server.test_messages import PATH, TOOL, USER, anthropic_client, post, roomy, stream


def _use(**fields: object) -> dict:
    return {"type": "tool_use", "id": "a", "name": "b", "input": {}, **fields}


def _with_block(block: object, role: str = "user") -> dict:
    return {"messages": [{"role": role, "content": [block]}, USER]}


_LIST_TOOL = {"name": "a", "input_schema": {"type": "array"}}
_REFUSED = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 3, "min_tokens": 20}, "min_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, "messages[1].content"),
    (_with_block({"type": "image", "source": {}}), "messages[0].content[0].type"),
    (_with_block({"type": "text"}), "messages[0].content[0].text"),
    (_with_block({"type": "text", "text": "a", "citations": [{}]}), "messages[0].content[0].citations"),
    (_with_block({"type": "thinking", "thinking": "a"}, "assistant"), "messages[0].content[0].type"),
    (_with_block(_use()), "messages[0].content[0].type"),
    (_with_block(_use(id=None), "assistant"), "messages[0].content[0].id"),
    (_with_block(_use(name="b b"), "assistant"), "messages[0].content[0].name"),
    (_with_block(_use(input="{}"), "assistant"), "messages[0].content[0].input"),
    (_with_block(_use(input={"a": float("inf")}), "assistant"), "messages[0].content[0].input"),
    (_with_block(_use(input=nested(65)), "assistant"), "messages[0].content[0].input"),
    ({"tools": [{"name": "a", "input_schema": nested(65)}]}, "tools[0].input_schema"),
    (_with_block({"type": "tool_result", "content": "a"}), "messages[0].content[0].tool_use_id"),
    (
        _with_block({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
        "messages[0].content[0].content[0].type",
    ),
    (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]},
            ]
        },
        "messages[1]",
    ),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"temperature": 3}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"top_p": 1.5}, "top_p"),
    ({"stream": "yes"}, "stream"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools[0].input_examples"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    (
        {"tools": [{"name": "a", "input_schema": {"type": "array"}}], "tool_choice": {"type": "any"}},
        "tools[0].input_schema",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": "b"}, "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": "auto", "tools": [TOOL]}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
    ({"output_config": {"effort": "max"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"logit_bias": {"9999999": 1}}, "logit_bias"),
    ({"n": 2}, "n"),
    ({"max_completion_tokens": 2}, "max_completion_tokens"),
]


@pytest.mark.parametrize(("change", "param"), _REFUSED, ids=lambda value: value if isinstance(value, str) else "")
async def test_what_is_wrong_is_named(change, param):
    engine = roomy()
    response = await post(engine, **change)
    assert response.status_code == 400, response.text
    body = response.json()
    assert sorted(body) == ["error", "type"]
    assert sorted(body["error"]) == ["message", "type"]
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert param in body["error"]["message"]
    assert engine.submitted == []


async def test_neutral_values_are_taken():
    body = {
        "cache_control": {"type": "ephemeral"},
        "container": None,
        "mcp_servers": [],
        "metadata": {"user_id": None},
        "output_config": {"effort": "high", "format": None},
        "service_tier": "standard_only",
        "speed": "standard",
        "stop_sequences": [],
        "system": None,
        "thinking": {"type": "disabled"},
        "tool_choice": {"type": "auto"},
        "tools": [],
    }
    response = await post(FakeEngine(), **body)
    assert response.status_code == 200, response.text
    assert "x-octavo-ignored-fields" not in response.headers


async def test_statuses_and_types_of_errors():
    def broken(_message, _index):
        raise RuntimeError("secret")

    engine = FakeEngine()
    other = await post(engine, model="other")
    assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")
    async with client_of(make_app(engine, api_key=("k",), max_body_size=1024)) as client:
        unknown = await client.post(PATH, json={})
        large = await client.post(PATH, content=b" " * 1025, headers={"authorization": "Bearer k"})
        wrong = await client.get(PATH, headers={"authorization": "Bearer k"})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (401, "authentication_error")
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
    assert wrong.headers["request-id"] == wrong.headers["x-request-id"]
    engine.is_down = True
    down = await post(engine)
    assert (down.status_code, down.json()["error"]["type"]) == (529, "overloaded_error")
    assert down.headers["retry-after"] == "1"
    engine.is_down = False
    engine.lacks = "No memory for the grammar."
    lacking = await post(engine)
    assert (lacking.status_code, lacking.json()["error"]["type"]) == (529, "overloaded_error")
    assert lacking.headers["retry-after"] == "1"
    engine.submit = broken  # type: ignore[method-assign]
    failed = await post(engine)
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "api_error")
    assert "secret" not in failed.text


async def test_engine_that_dies_in_a_stream_ends_it_with_an_error_event():
    engine = FakeEngine(says("abcdef"))
    engine.dies_after = 3
    *_, last = await stream(engine)
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
    engine = FakeEngine(says("abcdef"))
    engine.failure = SequenceFailure("output_config.format takes too much.", "output_config.format")
    *_, last = await stream(engine)
    assert last["error"] == {"type": "invalid_request_error", "message": engine.failure.message}


async def test_anthropic_client_errors():
    engine = FakeEngine(says("Hello"))
    client = anthropic_client(engine)
    request = {"model": "byte-model", "max_tokens": 10, "messages": [USER]}
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(**{**request, "messages": []})
    assert refused.value.type == "invalid_request_error"
    assert refused.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**{**request, "model": "other"})
    engine.dies_after = 2
    with pytest.raises(anthropic.APIStatusError, match="The engine process died"):
        async for _ in await client.messages.create(**request, stream=True):
            pass
    engine.is_down = True
    with pytest.raises(anthropic.OverloadedError):
        await client.messages.create(**request)
