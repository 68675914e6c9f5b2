"""OpenAI's `/v1/responses` against a scripted engine: shapes, the events of a stream, tools, and its own client."""

import json
from urllib.parse import unquote

import httpx
import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from scheduler.output import SequenceFailure
from tests.data_files import emoji, naughty_strings, openai_response_events
from tests.server.chat_templates import QWEN_TOOLS
from tests.server.doubles import FakeEngine, client_of, make_app, says
from tests.server.test_messages import CALL, prompt_of, roomy, tokenizer_with

PATH = "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": PARAMETERS}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
EVENT = TypeAdapter(ResponseStreamEvent)
ARGUMENTS = '{"city": "Os\u00f6lo"}'
LOGPROBS = ["message.output_text.logprobs"]


async def post(engine: FakeEngine, template: str | None = None, **body: object) -> httpx.Response:
    app = make_app(engine, tokenizer=None if template is None else tokenizer_with(template))
    async with client_of(app) as client:
        return await client.post(PATH, json={"input": "Hi", **body})


async def respond(engine: FakeEngine, **body: object) -> dict:
    response = await post(engine, **body)
    assert response.status_code == 200, response.text
    Response.model_validate(response.json(), strict=True)
    return response.json()


async def stream(engine: FakeEngine, **body: object) -> list[dict]:
    """The data of the events: each is named by its type, numbered, and has all that OpenAI's description requires."""
    response = await post(engine, stream=True, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    found = []
    for number, event in enumerate(events):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
        described = {field for field in openai_response_events()[found[-1]["type"]] if "(" not in field}
        assert described <= found[-1].keys()
        EVENT.validate_python(found[-1], strict=True)
    return found


def folded(events: list[dict]) -> list[dict]:
    """The items that the deltas of a stream make."""
    items: list[dict] = []
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                assert event["item"]["status"] == "in_progress"
                items.append(event["item"])
            case "response.content_part.added":
                items[event["output_index"]]["content"].append(event["part"])
            case "response.output_text.delta":
                part = items[event["output_index"]]["content"][event["content_index"]]
                part["text"] += event["delta"]
                part["logprobs"] += event["logprobs"]
            case "response.function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "response.output_text.done":
                part = items[event["output_index"]]["content"][event["content_index"]]
                assert (event["text"], event["logprobs"]) == (part["text"], part["logprobs"])
            case "response.content_part.done":
                assert event["part"] == items[event["output_index"]]["content"][event["content_index"]]
            case "response.function_call_arguments.done":
                item = items[event["output_index"]]
                assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
            case "response.output_item.done":
                items[event["output_index"]]["status"] = event["item"]["status"]
                assert event["item"] == items[event["output_index"]]
        if "item_id" in event:
            assert event["item_id"] == items[event["output_index"]]["id"]
    return items


def without_ids(items: list[dict]) -> list[dict]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


async def test_answer_has_the_shape_of_the_description():
    engine = FakeEngine(says("Hello"))
    answer = await respond(engine, instructions="Be brief.", metadata={"a": "b"}, user="u", max_output_tokens=50)
    assert answer["id"].startswith("resp_")
    assert answer["output"][0].pop("id").startswith("msg_")
    assert answer["created_at"] <= answer["completed_at"]
    num_prompt = len(engine.submitted[0].prompt_token_ids)
    text = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    expected = {
        "object": "response",
        "status": "completed",
        "model": "byte-model",
        "output": [{"type": "message", "role": "assistant", "status": "completed", "content": [text]}],
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "max_output_tokens": 50,
        "store": False,
        "temperature": 1.0,
        "top_p": 1.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
        "error": None,
        "incomplete_details": None,
        "user": "u",
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 6,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + 6,
        },
    }
    assert {name: answer[name] for name in expected} == expected
    assert prompt_of(engine) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_events_of_a_text():
    events = await stream(FakeEngine(says("ab")))
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    created, ended = events[0]["response"], events[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert events[1]["response"] == created
    assert ended["output"] == folded(events)
    assert {name for name in created if created[name] != ended[name]} == {"status", "output", "usage", "completed_at"}


async def test_events_of_a_function_call():
    events = await stream(roomy(says(CALL), chunks=(200,)), template=QWEN_TOOLS, tools=[TOOL])
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    (item,) = folded(events)
    assert (item["name"], item["arguments"], item["status"]) == ("get_weather", ARGUMENTS, "completed")
    assert events[-1]["response"]["output"] == [item]


async def test_an_answer_without_text_is_an_empty_message():
    answer = await respond(FakeEngine(says("")))
    assert answer["output"][0]["content"][0]["text"] == ""
    assert without_ids(folded(await stream(FakeEngine(says(""))))) == without_ids(answer["output"])


_PIECE = st.sampled_from([*emoji()[:40], *naughty_strings()[:60], CALL, CALL, "<tool_call>", "a", "\n", "STOP", "ST"])


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(_PIECE).map("".join),
    chunks=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    max_tokens=st.integers(1, 150),
    include=st.sampled_from([None, LOGPROBS]),
    has_tools=st.booleans(),
)
async def test_streamed_equals_plain(text, chunks, max_tokens, include, has_tools):
    body = {"template": QWEN_TOOLS, "stop": ["STOP"], "max_output_tokens": max_tokens, "include": include}
    body |= {"tools": [TOOL]} if has_tools else {}
    plain = await respond(roomy(says(text)), **body)
    events = await stream(roomy(says(text), chunks), **body)
    assert without_ids(folded(events)) == without_ids(plain["output"])
    ended = events[-1]["response"]
    assert events[-1]["type"] == f"response.{plain['status']}"
    assert without_ids(ended["output"]) == without_ids(plain["output"])
    assert (ended["usage"], ended["incomplete_details"]) == (plain["usage"], plain["incomplete_details"])


async def test_an_answer_that_is_cut_off_says_so():
    answer = await respond(FakeEngine(says("Hello")), max_output_tokens=3)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (answer["output"][0]["status"], answer["completed_at"]) == ("incomplete", None)
    events = await stream(FakeEngine(says("Hello")), max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete"


async def test_a_call_with_broken_arguments_is_not_complete():
    answer = await respond(roomy(says(CALL.replace('"}', '",}') + CALL)), template=QWEN_TOOLS, tools=[TOOL])
    assert [item["status"] for item in answer["output"]] == ["incomplete", "completed"]


async def test_logprobs_are_those_of_the_text():
    answer = await respond(FakeEngine(says("\u00e9")), include=LOGPROBS, top_logprobs=2)
    logprobs = answer["output"][0]["content"][0]["logprobs"]
    assert bytes(byte for token in logprobs for byte in token["bytes"]).decode() == "\u00e9"
    assert [len(token["top_logprobs"]) for token in logprobs] == [2, 2]
    called = await respond(roomy(says(f"See:{CALL}")), template=QWEN_TOOLS, tools=[TOOL], include=LOGPROBS)
    logprobs = called["output"][0]["content"][0]["logprobs"]
    assert "".join(token["token"] for token in logprobs) == "See:"


async def test_items_reach_the_template():
    engine = roomy()
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Looking.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "get_weather", "arguments": ARGUMENTS},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "And?"},
    ]
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls %}[{{ c.id }} {{ c.function.arguments.city }}]{% endfor %}"
        "{{ m.tool_call_id }}{{ '\\n' }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
    )
    response = await post(engine, template, input=items)
    assert response.status_code == 200, response.text
    assert "x-octavo-ignored-fields" not in response.headers
    assert prompt_of(engine).splitlines() == [
        "system:Be brief.",
        "user:Hi",
        "assistant:Looking.[c1 Os\u00f6lo][c2 Rome]",
        "tool:rainc1",
        "tool:sunc2",
        "assistant:No.",
        "user:And?",
    ]


async def test_an_answer_can_be_sent_back():
    engine = roomy(says(f"See:{CALL}"))
    body = {"template": QWEN_TOOLS, "tools": [TOOL]}
    output = (await respond(engine, **body))["output"]
    result = {"type": "function_call_output", "call_id": output[1]["call_id"], "output": "rain"}
    await respond(engine, **body, input=[{"role": "user", "content": "Hi"}, *output, result])
    prompt = prompt_of(engine)
    assert "<|im_start|>assistant\nSee:\n<tool_call>" in prompt
    assert "<tool_response>\nrain\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("choice", "kind", "shown"),
    [
        ("required", "grammar", "required"),
        ("auto", None, "auto"),
        ("none", None, "none"),
        ({"type": "function", "name": "get_weather"}, "grammar", {"type": "function", "name": "get_weather"}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]},
            "grammar",
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]},
        ),
    ],
)
async def test_tool_choice_becomes_a_grammar(choice, kind, shown):
    engine = roomy(says("x"))
    answer = await respond(engine, template=QWEN_TOOLS, tools=[TOOL], tool_choice=choice)
    grammar = engine.submitted[0].params.structured_output
    assert (grammar and grammar.kind) == kind
    assert answer["tool_choice"] == shown
    assert answer["tools"] == [{**TOOL, "strict": None}]


async def test_text_format_becomes_a_schema():
    engine = FakeEngine(says("{}"))
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    answer = await respond(engine, text={"format": form})
    asked = engine.submitted[0].params.structured_output
    assert (asked.kind, json.loads(asked.value)) == ("json_schema", SCHEMA)
    assert asked.param.startswith("text.format")
    assert answer["text"]["format"] == form
    await respond(engine, text={"format": {"type": "json_object"}})
    assert engine.submitted[1].params.structured_output.kind == "json_object"


async def test_sampling_fields():
    engine = FakeEngine()
    body = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 7, "min_p": 0.1, "repetition_penalty": 1.5}
    answer = await respond(engine, **body)
    params = engine.submitted[0].params
    assert {name: getattr(params, name) for name in body} == body
    assert (answer["temperature"], answer["top_p"]) == (0.5, 0.9)
    assert len(engine.submitted[0].prompt_token_ids) + params.max_tokens == 256


async def test_obfuscated_events_have_one_size():
    events = await stream(FakeEngine(says("abcdefghij")), stream_options={"include_obfuscation": True})
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert len({len(json.dumps(event)) for event in deltas}) == 1
    assert all(event["obfuscation"] for event in deltas)
    plain = await stream(FakeEngine(says("ab")), stream_options={"include_obfuscation": False})
    assert not any("obfuscation" in event for event in plain)


async def test_tokens_are_counted_as_they_are_prompted():
    body = {"input": [{"role": "user", "content": "Hi"}], "instructions": "Be brief.", "tools": [TOOL]}
    app = make_app(roomy(), tokenizer=tokenizer_with(QWEN_TOOLS))
    async with client_of(app) as client:
        counted = await client.post(f"{PATH}/input_tokens", json={**body, "whatever": 1})
        answer = await client.post(PATH, json=body)
    assert counted.json() == {
        "object": "response.input_tokens",
        "input_tokens": answer.json()["usage"]["input_tokens"],
    }
    assert counted.headers["x-octavo-ignored-fields"] == "whatever"


async def test_unknown_fields_are_named():
    items = [{"role": "user", "content": [{"type": "input_text", "text": "a", "mood": 1}]}]
    response = await post(FakeEngine(), whatever=1, input=items, text={"format": {"type": "text", "x": 1}}, seed=None)
    named = unquote(response.headers["x-octavo-ignored-fields"]).split(",")
    assert named == ["whatever", "input[0].content[0].mood", "text.format.x"]


async def test_engine_that_dies_in_a_stream_ends_it_as_failed():
    engine = FakeEngine(says("abcdef"))
    engine.dies_after = 3
    *_, last = await stream(engine)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "The engine process died."}
    engine = FakeEngine(says("abcdef"))
    engine.failure = SequenceFailure("text.format takes too much.", "text.format")
    *_, last = await stream(engine)
    assert last["response"]["error"] == {"code": "invalid_prompt", "message": "text.format takes too much."}


def openai_client(engine: FakeEngine) -> openai.AsyncOpenAI:
    transport = httpx2.ASGITransport(make_app(engine, tokenizer=tokenizer_with(QWEN_TOOLS)))
    http_client = httpx2.AsyncClient(transport=transport)
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=http_client, max_retries=0)


async def test_openai_client():
    client = openai_client(roomy(says(f"See:{CALL}"), chunks=(2, 5)))
    request = {"model": "byte-model", "input": "Hi", "tools": [{**TOOL, "strict": False}]}
    whole = await client.responses.create(**request)
    assert whole.output_text == "See:"
    assert json.loads(whole.output[1].arguments) == json.loads(ARGUMENTS)
    async with client.responses.stream(**request) as events:
        texts = [event.delta async for event in events if event.type == "response.output_text.delta"]
        streamed = await events.get_final_response()
    assert "".join(texts) == streamed.output_text == "See:"
    assert streamed.usage == whole.usage
    counted = await client.responses.input_tokens.count(**request)
    assert counted.input_tokens == whole.usage.input_tokens


async def test_openai_client_errors():
    engine = FakeEngine(says("Hello"))
    client = openai_client(engine)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="byte-model", input="Hi", store=True)
    assert (refused.value.param, refused.value.type) == ("store", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="other", input="Hi")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_1")
