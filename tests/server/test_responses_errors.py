"""Every way in which a request for a response can be wrong, and what its sender is told."""

import pytest

from tests.server.doubles import FakeEngine, client_of, make_app
from tests.server.test_messages import roomy
from tests.server.test_responses import PATH, SCHEMA, TOOL, post

_LIST_TOOL = {"type": "function", "name": "a", "parameters": {"type": "array"}}
_NAMED = {"type": "function", "name": "b"}


def _item(**fields: object) -> dict:
    return {"input": [{"role": "user", "content": "Hi"}, fields]}


def _part(**fields: object) -> dict:
    return _item(role="user", content=[fields])


def _call(**fields: object) -> dict:
    return _item(type="function_call", **{"call_id": "c", "name": "b", "arguments": "{}", **fields})


_REFUSED = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": "x" * 5000}, "input"),
    ({"input": "x" * 4000, "max_output_tokens": 500}, "max_output_tokens"),
    (_item(role="robot", content="a"), "input[1].role"),
    (_item(role="user"), "input[1].content"),
    (_item(content="a"), "input[1].role"),
    (_item(type="reasoning", summary=[]), "input[1].type"),
    (_item(type="item_reference", id="msg_1"), "input[1].type"),
    (_item(id="msg_1"), "input[1].role"),
    (_part(type="input_image", image_url="x"), "input[1].content[0].type"),
    (_part(type="output_text", text="a"), "input[1].content[0].type"),
    (_part(type="input_text"), "input[1].content[0].text"),
    (_item(role="assistant", content=[{"type": "refusal"}]), "input[1].content[0].refusal"),
    (
        _item(role="assistant", content=[{"type": "output_text", "text": "a", "annotations": [{}]}]),
        "input[1].content[0].annotations",
    ),
    (_call(call_id=None), "input[1].call_id"),
    (_call(name="a b"), "input[1].name"),
    (_call(arguments="[]"), "input[1].arguments"),
    (_call(arguments='{"a": 1e999}'), "input[1].arguments"),
    (_call(arguments={}), "input[1].arguments"),
    (_item(type="function_call_output", output="a"), "input[1].call_id"),
    (_item(type="function_call_output", call_id="c"), "input[1].output"),
    (_item(type="function_call_output", call_id="c", output=[{"type": "input_file"}]), "input[1].output[0].type"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 2**63}, "max_output_tokens"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"include": "x"}, "include"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {"a" * 65: "b"}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [_LIST_TOOL], "tool_choice": "required"}, "tools[0].parameters.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice.type"),
    ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.name"),
    ({"tool_choice": _NAMED, "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "tools": [_NAMED]}, "tools": [TOOL]}, "tool_choice.mode"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [_NAMED]}, "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": {"type": "mcp", "server_label": "x"}, "tools": [TOOL]}, "tool_choice.type"),
    ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x x", "schema": SCHEMA}}}, "text.format.name"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({"background": True}, "background"),
    ({"context_management": [{}]}, "context_management"),
    ({"conversation": "c"}, "conversation"),
    ({"moderation": {"model": "m"}}, "moderation"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"store": True}, "store"),
    ({"truncation": "auto"}, "truncation"),
    ({"logit_bias": {"9999999": 1}}, "logit_bias"),
    ({"stop": [""]}, "stop"),
    ({"n": 2}, "n"),
    ({"messages": []}, "messages"),
    ({"response_format": {"type": "text"}}, "response_format"),
]


@pytest.mark.parametrize(("change", "param"), _REFUSED, ids=lambda value: value if isinstance(value, str) else "")
async def test_what_is_wrong_is_named(change, param):
    engine = roomy()
    response = await post(engine, **change)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert engine.submitted == []


async def test_neutral_values_are_taken():
    body = {
        "background": False,
        "conversation": None,
        "include": ["reasoning.encrypted_content"],
        "input": [{"type": None, "role": "user", "content": "Hi", "status": None}],
        "max_tool_calls": 3,
        "metadata": {},
        "moderation": None,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "reasoning": {"effort": None, "summary": "auto"},
        "safety_identifier": "s",
        "service_tier": "auto",
        "store": False,
        "stream": False,
        "text": {"verbosity": "medium", "format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
    }
    response = await post(FakeEngine(), **body)
    assert response.status_code == 200, response.text
    assert "x-octavo-ignored-fields" not in response.headers


async def test_engine_refusal_names_the_field_of_this_api():
    engine = FakeEngine()
    engine.rejects = "max_tokens 99 needs 9 KV blocks; the whole cache has 4."
    for streamed in (False, True):
        response = await post(engine, stream=streamed)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "max_output_tokens")
        assert error["message"].startswith("max_output_tokens 99")


async def test_stored_responses_do_not_exist():
    async with client_of(make_app(FakeEngine())) as client:
        for method, path in (("GET", "resp_1"), ("DELETE", "resp_1"), ("POST", "resp_1/cancel")):
            response = await client.request(method, f"{PATH}/{path}")
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
