"""Anthropic's `/v1/messages` against a scripted engine: shapes, streams, tools, errors, and its own client."""

import json
from collections.abc import Callable
from functools import cache
from urllib.parse import unquote

import anthropic
import httpx
import httpx2
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pydantic import TypeAdapter

from server.messages import Submit
from server.tokenizer import Tokenizer
from tests.data_files import emoji, naughty_strings
from tests.server.chat_templates import QWEN_TOOLS
from tests.server.doubles import FakeEngine, byte_tokenizer, client_of, echo_reversed, make_app, says

PATH = "/v1/messages"
USER = {"role": "user", "content": "Hi"}
TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os\u00f6lo"}}\n</tool_call>'
EVENT = TypeAdapter(RawMessageStreamEvent)
Script = Callable[[Submit, int], list[int]]


@cache
def tokenizer_with(template: str) -> Tokenizer:
    """Compiling a template takes a while."""
    return byte_tokenizer(template)


def roomy(script: Script = echo_reversed, chunks: tuple[int, ...] = (1,)) -> FakeEngine:
    """An engine whose window holds the descriptions of tools."""
    engine = FakeEngine(script, chunks)
    assert engine.info is not None
    engine.info = replace(engine.info, max_model_len=4096)
    return engine


async def post(engine: FakeEngine, template: str | None = None, path: str = PATH, **body: object) -> httpx.Response:
    app = make_app(engine, tokenizer=None if template is None else tokenizer_with(template))
    async with client_of(app) as client:
        content = json.dumps({"max_tokens": 64, "messages": [USER], **body})  # with numbers that httpx refuses
        return await client.post(path, content=content)


async def message(engine: FakeEngine, **body: object) -> dict:
    response = await post(engine, **body)
    assert response.status_code == 200, response.text
    Message.model_validate(response.json(), strict=True)
    return response.json()


async def stream(engine: FakeEngine, **body: object) -> list[dict]:
    response = await post(engine, stream=True, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def events_of(text: str) -> list[dict]:
    """The data of the events, each of which is named by its type and has the form that the client expects."""
    *events, rest = text.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        if found[-1]["type"] != "error":
            EVENT.validate_python(found[-1], strict=True)
    return found


def prompt_of(engine: FakeEngine) -> str:
    return byte_tokenizer().decode(list(engine.submitted[-1].prompt_token_ids))


def parsed(text: str) -> dict:
    """A tool's input, which may have been cut off."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {"INVALID_JSON": text}


def folded(events: list[dict]) -> dict:
    """The message that a stream's events make, as Anthropic describes it."""
    first, *rest = events
    assert first["type"] == "message_start"
    whole = first["message"]
    pieces: list[list[str]] = []
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(whole["content"])
                whole["content"].append(event["content_block"])
                pieces.append([])
            case "content_block_delta":
                assert event["index"] == len(whole["content"]) - 1
                delta = event["delta"]
                pieces[-1].append(delta["text"] if delta["type"] == "text_delta" else delta["partial_json"])
            case "content_block_stop":
                block, text = whole["content"][event["index"]], "".join(pieces[event["index"]])
                block |= {"text": text} if block["type"] == "text" else {"input": parsed(text)}
            case "message_delta":
                whole |= event["delta"]
                whole["usage"] |= event["usage"]
    assert rest[-1]["type"] == "message_stop"
    return whole


async def test_answer_has_anthropics_shape():
    engine = FakeEngine(says("Hello"))
    answer = await message(engine, model="byte-model", metadata={"user_id": "u"})
    assert answer["id"].startswith("msg_")
    del answer["id"]
    num_prompt = len(engine.submitted[0].prompt_token_ids)
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "byte-model",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt,
            "output_tokens": 6,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "service_tier": "standard",
        },
    }


async def test_events_of_a_stream():
    events = await stream(FakeEngine(says("ab")))
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 3


async def test_an_answer_without_text_has_no_content():
    assert (await message(FakeEngine(says(""))))["content"] == []
    events = await stream(FakeEngine(says("")))
    assert [event["type"] for event in events] == ["message_start", "message_delta", "message_stop"]


_PIECE = st.sampled_from([*emoji()[:40], *naughty_strings()[:60], CALL, CALL, "<tool_call>", "a", "\n", "STOP", "ST"])


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(_PIECE).map("".join),
    chunks=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    max_tokens=st.integers(0, 150),
)
async def test_streamed_equals_plain(text, chunks, max_tokens):
    script = says(text)
    body = {"template": QWEN_TOOLS, "tools": [TOOL], "stop_sequences": ["STOP"], "max_tokens": max_tokens}
    plain = await message(roomy(script), **body)
    whole = folded(await stream(roomy(script, chunks), **body))
    assert without_ids(whole) == without_ids(plain)


def without_ids(answer: dict) -> dict:
    """The message and each call of a tool have a new one each time."""
    content = [{key: value for key, value in block.items() if key != "id"} for block in answer["content"]]
    return {**answer, "id": "", "content": content}


async def test_system_and_parts_reach_the_template():
    engine = FakeEngine()
    await message(
        engine,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d"},
            {"role": "system", "content": "e"},
            {"role": "user", "content": "f"},
        ],
    )
    assert prompt_of(engine) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na\nb\nc<|im_end|>\n"
        "<|im_start|>assistant\nd<|im_end|>\n<|im_start|>system\ne<|im_end|>\n<|im_start|>user\nf<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_answer_goes_on_from_what_the_assistant_has_begun():
    engine = FakeEngine(says(" two"))
    answer = await message(engine, messages=[USER, {"role": "assistant", "content": "one"}])
    assert prompt_of(engine).endswith("<|im_start|>assistant\none")
    assert answer["content"] == [{"type": "text", "text": " two"}]


_NO = [{"type": "text", "text": "no"}]


async def test_tools_their_calls_and_their_results_reach_the_template():
    engine = roomy()
    history = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Looking."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "t2", "name": "get_weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no"}],
                },
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
        "{{ m.tool_call_id }}{{ '\\n' }}{% endfor %}<tool_call>"
    )
    response = await post(engine, template, messages=history, tools=[TOOL], tool_choice={"type": "none"})
    assert response.status_code == 200, response.text
    response = await post(engine, template, messages=history, tools=[TOOL])
    assert response.status_code == 200, response.text
    tool, *lines = prompt_of(engine).removesuffix("<tool_call>").splitlines()
    function = {"name": TOOL["name"], "description": TOOL["description"], "parameters": TOOL["input_schema"]}
    assert json.loads(tool) == {"type": "function", "function": function}
    assert lines == [
        "user:Hi",
        "assistant:Looking.[t1 get_weather Oslo][t2 get_weather Rome]",
        "tool:raint1",
        "tool:Error: not2",
        "user:And?",
    ]


async def test_tool_use():
    script = says(f"Let me see.\n{CALL}\n{CALL}")
    answer = await message(roomy(script), template=QWEN_TOOLS, tools=[TOOL], max_tokens=200)
    assert answer["stop_reason"] == "tool_use"
    text, *calls = answer["content"]
    assert text["text"].startswith("Let me see.")
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "get_weather", {"city": "Os\u00f6lo"})
    ] * 2
    assert len({call["id"] for call in calls}) == 2
    events = await stream(roomy(script, chunks=(3,)), template=QWEN_TOOLS, tools=[TOOL], max_tokens=200)
    whole = folded(events)
    assert [block.get("input") for block in whole["content"]] == [None, *[{"city": "Os\u00f6lo"}] * 2]
    assert whole["stop_reason"] == "tool_use"


async def test_input_that_was_cut_off_is_kept_as_it_is():
    cut = CALL[: CALL.index("Os") + 2]
    answer = await message(roomy(says(cut, ends=False)), template=QWEN_TOOLS, tools=[TOOL], max_tokens=len(cut))
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][-1]["input"] == {"INVALID_JSON": '{"city": "Os'}
    broken = roomy(says(CALL.replace('"}', '",}')))
    answer = await message(broken, template=QWEN_TOOLS, tools=[TOOL], max_tokens=200)
    assert "INVALID_JSON" in answer["content"][-1]["input"]
    assert answer["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ({"type": "any"}, "grammar"),
        ({"type": "tool", "name": "get_weather"}, "grammar"),
        ({"type": "auto", "disable_parallel_tool_use": True}, "grammar"),
        ({"type": "auto"}, None),
        ({"type": "none"}, None),
    ],
)
async def test_tool_choice_becomes_a_grammar(choice, kind):
    engine = roomy(says("x"))
    await message(engine, template=QWEN_TOOLS, tools=[TOOL], tool_choice=choice)
    grammar = engine.submitted[0].params.structured_output
    assert (grammar and grammar.kind) == kind


async def test_output_format_becomes_a_schema():
    engine = FakeEngine(says("{}"))
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    await message(engine, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "high"})
    asked = engine.submitted[0].params.structured_output
    assert (asked.kind, json.loads(asked.value)) == ("json_schema", schema)
    assert asked.param.startswith("output_config.format")


async def test_sampling_fields():
    engine = FakeEngine()
    body = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 7, "min_p": 0.1, "repetition_penalty": 1.5}
    await message(engine, **body)
    params = engine.submitted[0].params
    assert {name: getattr(params, name) for name in body} == body
    assert params.max_tokens == 64


@pytest.mark.parametrize(
    ("max_tokens", "text", "reason"),
    [
        (3, "Hel", "max_tokens"),
        (5, "Hello", "max_tokens"),
        (0, None, "max_tokens"),
        (10_000, "Hello", "end_turn"),
    ],
)
async def test_max_tokens(max_tokens, text, reason):
    answer = await message(FakeEngine(says("Hello")), max_tokens=max_tokens)
    assert answer["content"] == ([] if text is None else [{"type": "text", "text": text}])
    assert answer["stop_reason"] == reason


async def test_an_answer_that_the_window_ends_says_so():
    engine = FakeEngine(says("x" * 300))
    answer = await message(engine, max_tokens=1000)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"] == 256
    assert folded(await stream(engine, max_tokens=1000))["stop_reason"] == "model_context_window_exceeded"


async def test_stop_sequence():
    answer = await message(FakeEngine(says("one two three")), stop_sequences=["zzz", " three"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " three")
    assert answer["content"] == [{"type": "text", "text": "one two"}]


async def test_tokens_are_counted_as_they_are_prompted():
    engine = roomy()
    body = {"messages": [USER, {"role": "assistant", "content": "x"}, USER], "system": "Be brief.", "tools": [TOOL]}
    async with client_of(make_app(engine)) as client:
        unknown = {"whatever": 1, "chat_template_kwargs": {"mystery": 1}}
        counted = await client.post(f"{PATH}/count_tokens", json={**body, **unknown})
        answer = await client.post(PATH, json={**body, "max_tokens": 1})
    assert counted.json() == {"input_tokens": answer.json()["usage"]["input_tokens"]}
    assert unquote(counted.headers["x-octavo-ignored-fields"]) == "whatever,chat_template_kwargs.mystery"


async def test_unknown_fields_are_named():
    block = {"type": "text", "text": "a", "mood": 1}
    response = await post(
        FakeEngine(), whatever=1, messages=[{"role": "user", "content": [block]}], top_k=None, seed=None
    )
    assert unquote(response.headers["x-octavo-ignored-fields"]) == "whatever,messages[0].content[0].mood"


def anthropic_client(engine: FakeEngine, **settings: object) -> anthropic.AsyncAnthropic:
    transport = httpx2.ASGITransport(make_app(engine, tokenizer=tokenizer_with(QWEN_TOOLS), **settings))
    http_client = httpx2.AsyncClient(transport=transport)
    return anthropic.AsyncAnthropic(base_url="http://test", api_key="k", http_client=http_client, max_retries=0)


async def test_anthropic_client():
    client = anthropic_client(roomy(says(f"See:\n{CALL}"), chunks=(2, 5)))
    request = {"model": "byte-model", "max_tokens": 100, "messages": [USER], "tools": [TOOL]}
    whole = await client.messages.create(**request)
    async with client.messages.stream(**request) as events:
        texts = [text async for text in events.text_stream]
        streamed = await events.get_final_message()
    assert "".join(texts) == whole.content[0].text
    assert [block.input for block in streamed.content[1:]] == [block.input for block in whole.content[1:]]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    result = {"type": "tool_result", "tool_use_id": whole.content[1].id, "content": "rain"}
    history = [USER, whole.to_param(), {"role": "user", "content": [result]}]
    again = await client.messages.create(**{**request, "messages": history})
    counted = await client.messages.count_tokens(model="byte-model", messages=history, tools=[TOOL])
    assert counted.input_tokens == again.usage.input_tokens > whole.usage.input_tokens
