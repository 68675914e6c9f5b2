"""Tools over HTTP against a scripted engine: what the model is told, what it is held to, and what the client reads."""

import json
from typing import Any
from urllib.parse import unquote

import openai
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from server.messages import EngineInfo
from server.tool_parsers.formats import HERMES
from tests import data_files
from tests.server import chat_templates
from tests.server.doubles import EOS, FakeEngine, byte_tokenizer, client_of, make_app, says
from tests.server.test_chat import openai_client
from tests.server.test_completions import events_of
from tests.server.test_tool_parsers import write

USER = {"role": "user", "content": "Weather?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather <now>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
NAMED = {"type": "function", "function": {"name": "get_time"}}
CALLS = [("get_weather", '{"city": "Köln 😀"}'), ("get_time", "{}")]
TEXT = "Let me see.\n" + write(HERMES, CALLS)


def engine_that(says_text: str, **settings_of_engine: Any) -> FakeEngine:
    engine = FakeEngine(says(says_text), **settings_of_engine)
    assert engine.info is not None
    known = {name: getattr(engine.info, name) for name in EngineInfo.__struct_fields__}
    engine.info = EngineInfo(**known | {"max_model_len": 100_000})
    return engine


async def post(engine: FakeEngine, template: str | None = None, **body: Any):
    tokenizer = byte_tokenizer() if template is None else byte_tokenizer(template)
    async with client_of(make_app(engine, tokenizer=tokenizer)) as client:
        content = json.dumps({"messages": [USER], "tools": TOOLS, **body})  # with numbers that httpx refuses
        return await client.post("/v1/chat/completions", content=content)


def prompt_of(engine: FakeEngine) -> str:
    return byte_tokenizer().decode(engine.submitted[0].prompt_token_ids)


def grammar_of(engine: FakeEngine) -> str | None:
    wanted = engine.submitted[0].params.structured_output
    return None if wanted is None else wanted.value


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


async def test_calls_are_read_out_of_the_answer():
    answer = (await post(engine_that(TEXT))).json()
    ChatCompletion.model_validate(answer, strict=True)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    assert calls_of(choice["message"]) == CALLS
    assert [call["type"] for call in choice["message"]["tool_calls"]] == ["function"] * 2


async def test_an_answer_of_calls_alone_has_no_content():
    message = (await post(engine_that(write(HERMES, CALLS)))).json()["choices"][0]["message"]
    assert message["content"] is None


ANSWERS = [
    *[TEXT, write(HERMES, CALLS[:1]), TEXT + "\nDone.", TEXT[:-30], "<tool_call>broken</tool_call> \n", ""],
    *[TEXT.replace("{}", "{1}"), TEXT.replace("{}", "[1]")],
    *data_files.naughty_strings()[::5],
    *data_files.emoji()[::100],
    *("".join(clusters) for clusters in data_files.grapheme_tests()[::20]),
]


@given(
    text=st.sampled_from(ANSWERS[:8]) | st.sampled_from(ANSWERS),
    stop=st.lists(st.text(min_size=1, max_size=2), max_size=2),
    cut=st.integers(0, 40),
    fields=st.fixed_dictionaries(
        {"tools": st.sampled_from([TOOLS, TOOLS, None]), "n": st.integers(1, 2)},
        optional={
            "include_stop_str_in_output": st.booleans(),
            "skip_special_tokens": st.booleans(),
            "logprobs": st.booleans(),
            "max_tokens": st.integers(0, 60),
        },
    ),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
@settings(max_examples=60, deadline=None)
async def test_a_stream_says_what_the_whole_answer_says(text, stop, cut, fields, chunks):
    stop = [*stop, *([text[cut : cut + 3]] if text[cut : cut + 3] and cut % 2 else [])]
    body = {"stop": stop, **fields}
    n = fields["n"]
    script = [*text.encode(), 256, *text.encode()[:3], EOS]
    engines = [engine_that("", chunks=chunks) for _ in range(2)]
    for engine in engines:
        engine.script = lambda _message, index: script[index:]
    whole = (await post(engines[0], **body)).json()
    events = events_of(await post(engines[1], stream=True, **body))
    for index in range(n):
        message: dict[str, Any] = {"content": "", "tool_calls": []}
        tokens, reasons, roles = [], [], []
        for event in events:
            ChatCompletionChunk.model_validate(event, strict=True)
            choice = event["choices"][0]
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            roles += [delta["role"]] if "role" in delta else []
            message["content"] += delta.get("content") or ""
            for piece in delta.get("tool_calls", []):
                if "id" in piece:
                    assert piece["index"] == len(message["tool_calls"])
                    message["tool_calls"].append({"function": {"name": piece["function"]["name"], "arguments": ""}})
                message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            tokens += (choice["logprobs"] or {"content": []})["content"]
        expected = whole["choices"][index]
        assert message["content"] == (expected["message"]["content"] or "")
        assert calls_of(message) == calls_of({"tool_calls": [], **expected["message"]})
        assert (reasons, roles) == ([expected["finish_reason"]], ["assistant"])
        assert tokens == (expected["logprobs"] or {"content": []})["content"]


async def test_arguments_stream_as_they_come():
    events = events_of(await post(engine_that(TEXT), stream=True))
    pieces = [piece for event in events for piece in event["choices"][0]["delta"].get("tool_calls", [])]
    assert len([piece for piece in pieces if piece["index"] == 0]) > 10


async def test_the_official_client_puts_a_stream_together():
    state = ChatCompletionStreamState()
    stream = await openai_client(engine_that(TEXT)).chat.completions.create(
        model="byte-model", messages=[USER], tools=TOOLS, stream=True
    )
    async for chunk in stream:
        state.handle_chunk(chunk)
    message = state.get_final_completion().choices[0].message
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == CALLS
    again = await openai_client(engine_that("7 degrees")).chat.completions.create(
        model="byte-model",
        messages=[USER, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"}],
        tools=TOOLS,
    )
    assert again.choices[0].message.content == "7 degrees"


def call_text(arguments: str) -> str:
    return write(HERMES, [("get_weather", arguments)])


@pytest.mark.parametrize(
    ("text", "body", "arguments"),
    [
        (call_text('{"city": Paris}'), {}, '{"city": Paris}'),
        (call_text('{"city": "Paris",}'), {}, '{"city": "Paris",}'),
        (call_text('{"city": "Pa\nris"}'), {}, '{"city": "Pa\nris"}'),
        (call_text('{"city": 1e999}'), {}, '{"city": 1e999}'),
        (call_text('{"city": NaN}'), {}, '{"city": NaN}'),
        (TEXT.replace("{}", "{1}"), {}, '{"city": "Köln 😀"}'),  # the second call is broken
        (call_text('{"city": "Paris"}'), {"stop": ["Paris"]}, '{"city": "'),
        (call_text("[1]"), {}, None),
        (call_text("5"), {}, None),
        (call_text("true"), {}, None),
        (call_text(r'"{\"city\": 1"'), {}, None),
        (call_text(r'"[1]"'), {}, None),
        ('<tool_call>{"arguments": {"city": Paris}, "name": "get_weather"}</tool_call>', {}, None),
    ],
)
async def test_arguments_that_are_no_json_object_are_no_reason_to_call(text, body, arguments):
    choice = (await post(engine_that(text), **body)).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    if arguments is None:
        assert choice["message"]["content"] == text
        assert "tool_calls" not in choice["message"]
    else:
        assert calls_of(choice["message"])[0] == ("get_weather", arguments)
    events = events_of(await post(engine_that(text), stream=True, **body))
    assert [r for event in events if (r := event["choices"][0]["finish_reason"])] == ["stop"]


async def test_length_cuts_a_call():
    choice = (await post(engine_that(TEXT), max_tokens=TEXT.encode().index("Köln ".encode()) + 6)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert calls_of(choice["message"]) == [("get_weather", '{"city": "Köln ')]


@pytest.mark.parametrize(
    ("choice", "cut", "content", "num_calls"),
    [
        ("required", 3, "", 0),
        (NAMED, 6, "", 0),
        ("auto", 3, "<to", 0),
        ("required", len(write(HERMES, CALLS[:1]).encode()) + 16, None, 1),
        ("auto", len(write(HERMES, CALLS[:1]).encode()) + 16, None, 1),
    ],
)
async def test_length_cuts_between_calls(choice, cut, content, num_calls):
    body = {"tool_choice": choice, "max_tokens": cut}
    answer = (await post(engine_that(write(HERMES, CALLS)), **body)).json()["choices"][0]
    assert (answer["finish_reason"], answer["message"]["content"]) == ("length", content)
    assert len(answer["message"].get("tool_calls", [])) == num_calls
    events = events_of(await post(engine_that(write(HERMES, CALLS)), stream=True, **body))
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == (content or "")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (chat_templates.QWEN_TOOLS, TEXT),
        (chat_templates.LLAMA, '{"name": "get_weather", "parameters": {"city": "Köln 😀"}}; {"name": "get_time"}'),
        (chat_templates.LLAMA, '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Köln 😀"}}'),
        (chat_templates.MISTRAL_TOOLS, '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Köln 😀"}}]'),
    ],
)
async def test_the_form_is_that_of_the_template(template, text):
    engine = engine_that(text)
    message = (await post(engine, template)).json()["choices"][0]["message"]
    assert calls_of(message)[0] == CALLS[0]
    assert "get_time" in prompt_of(engine)
    assert "strict" not in prompt_of(engine)


async def test_a_form_that_is_not_known_is_refused_unless_the_server_names_one():
    template = "{{ tools }}<function={{ messages }}"
    refused = await post(engine_that("x"), template)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
    app = make_app(engine_that(TEXT), tokenizer=byte_tokenizer(template), tool_call_parser="hermes")
    async with client_of(app) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": [USER], "tools": TOOLS})
    assert calls_of(answer.json()["choices"][0]["message"]) == CALLS


async def test_a_template_without_tools_gets_them_as_text():
    engine = engine_that("Warm.")
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "Wait.", "tool_calls": [call, {**call, "id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "8"}]},
        {"role": "user", "content": "So?"},
    ]
    await post(engine, messages=messages)
    system, *turns = prompt_of(engine).split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\n")
    assert json.dumps(WEATHER) in system
    written = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert [turn.removesuffix("<|im_end|>\n") for turn in turns] == [
        "user\nWeather?",
        f"assistant\nWait.\n{written}\n{written}",
        "user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response>\nSo?",
        "assistant\n",
    ]


async def test_real_conversations_with_tools_go_through():
    for row in data_files.function_calls()[::10]:
        calls = [(name, json.dumps(arguments)) for name, arguments in row["calls"]]
        answer = await post(engine_that(write(HERMES, calls)), messages=row["messages"], tools=row["tools"])
        assert answer.status_code == 200, answer.text
        assert calls_of({"tool_calls": [], **answer.json()["choices"][0]["message"]}) == calls


def allowed(mode: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}


@pytest.mark.parametrize(
    ("body", "functions", "may_talk", "several"),
    [
        ({"tool_choice": "required"}, {"get_weather", "get_time"}, False, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"get_weather", "get_time"}, False, False),
        ({"tool_choice": NAMED}, {"get_time"}, False, False),
        ({"tool_choice": allowed("required")}, {"get_time"}, False, True),
        ({"tool_choice": allowed("auto")}, {"get_time"}, True, True),
        ({"parallel_tool_calls": False}, {"get_weather", "get_time"}, True, False),
        ({"response_format": {"type": "json_object"}}, {"get_weather", "get_time"}, True, True),
        ({}, None, True, True),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, None, True, True),
        ({"tool_choice": "none"}, None, True, True),
    ],
)
async def test_a_grammar_holds_the_model_to_what_was_asked(body, functions, may_talk, several):
    engine = engine_that("x")
    answer = await post(engine, **body)
    assert answer.status_code == 200, answer.text
    grammar = grammar_of(engine)
    if functions is None:
        assert grammar is None
        return
    assert grammar is not None
    assert {name for name in ("get_weather", "get_time") if f'\\"{name}\\"' in grammar} == functions
    assert ("TEXT" in grammar or "content:" in grammar) == may_talk
    assert ("marked*" in grammar or "marked)*" in grammar) == several


async def test_a_strict_function_is_held_to_its_schema():
    engine = engine_that("x")
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    await post(engine, tools=[strict, TIME])
    grammar = grammar_of(engine)
    assert grammar is not None
    assert '"required": ["city"]' in grammar
    assert "TEXT" in grammar
    assert "strict" not in prompt_of(engine)


async def test_no_tools_are_told_of_with_tool_choice_none():
    engine = engine_that(TEXT)
    message = (await post(engine, tool_choice="none")).json()["choices"][0]["message"]
    assert "get_weather" not in prompt_of(engine)
    assert message["content"] == TEXT
    assert "tool_calls" not in message


async def test_marks_that_are_special_tokens_are_read_too():
    tokenizer = byte_tokenizer("{{ tools }}[TOOL_CALLS]", marks=["[OTHER]", "[TOOL_CALLS]"])
    other, mark = 258, 259
    engine = engine_that("")
    text = '[{"name": "get_time", "arguments": {}}]'
    engine.script = lambda _message, _index: [other, mark, *text.encode(), EOS]
    async with client_of(make_app(engine, tokenizer=tokenizer)) as client:
        body = {"messages": [USER], "tools": TOOLS, "tool_choice": "required"}
        answer = await client.post("/v1/chat/completions", json=body)
    message = answer.json()["choices"][0]["message"]
    assert (message["content"], calls_of(message)) == (None, [("get_time", "{}")])
    assert f"<[{mark}]>" in (grammar_of(engine) or "")
    assert len(message["tool_calls"][0]["id"]) == 9


def call_with(arguments: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [call]}, USER]}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def tool_with(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def schema_format(schema: dict[str, Any] | bool) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


async def test_content_of_any_schema_stands_beside_tools():
    for schema, written in (
        (True, 'content: %json {"x-guidance"'),
        ({"type": "null"}, 'content: %json {"type": "null"'),
    ):
        engine = engine_that("x")
        answer = await post(engine, response_format=schema_format(schema))
        assert answer.status_code == 200, answer.text
        grammar = grammar_of(engine)
        assert grammar is not None
        assert written in grammar
        assert grammar.count("json_allowed_escapes") == 3  # of two functions too


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TIME] * 600}, "tools"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [NAMED]}}},
            "tool_choice",
        ),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"tool_choice": "required", "guided_regex": "a+"}, "guided_regex"),
        ({"tool_choice": "required", "min_tokens": 2}, "min_tokens"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
            },
            "tools[0].function.parameters.type",
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        (call_with("{"), "messages[1].tool_calls[0].function.arguments"),
        (call_with("[1]"), "messages[1].tool_calls[0].function.arguments"),
        (call_with('{"a": NaN}'), "messages[1].tool_calls[0].function.arguments"),
        (call_with({"a": 1}), "messages[1].tool_calls[0].function.arguments"),
        (call_with("[" * 100_000), "messages[1].tool_calls[0].function.arguments"),
        (call_with(json.dumps(nested(65))), "messages[1].tool_calls[0].function.arguments"),
        (call_with(json.dumps(nested(900))), "messages[1].tool_calls[0].function.arguments"),
        (call_with('{"a": [' + "[" * 980 + "]" * 980 + "]}"), "messages[1].tool_calls[0].function.arguments"),
        (call_with('{"a": 1e999}'), "messages[1].tool_calls[0].function.arguments"),
        (call_with('{"a": -1.5e400}'), "messages[1].tool_calls[0].function.arguments"),
        (call_with('{"a": "' + "x" * (8 << 20) + '"}'), "messages[1].tool_calls[0].function.arguments"),
        ({"tools": [tool_with(nested(65))]}, "tools[0].function.parameters"),
        ({"tools": [tool_with({"minimum": float("inf")})]}, "tools[0].function.parameters"),
        (
            {"tool_choice": "required", "tools": [TIME, tool_with({"minProperties": 2})]},
            "tools[1].function.parameters",
        ),
        ({"response_format": schema_format(False)}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({"const": 2**53 + 1})}, "response_format.json_schema.schema"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{**USER, "tool_calls": call_with("{}")["messages"][1]["tool_calls"]}]},
            "messages[0].tool_calls",
        ),
        ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "messages[0].role"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"octavo_tick": 1}}, "chat_template_kwargs.octavo_tick"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs.continue_final_message"),
        ({"chat_template_kwargs": {str(i): 1 for i in range(65)}}, "chat_template_kwargs"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning_effort": "very"}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {
                "messages": [USER, {"role": "assistant", "content": "x"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
        ),
    ],
)
async def test_what_cannot_be_is_refused_by_name(body, param):
    answer = await post(engine_that("x"), **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_arguments_and_parameters_may_be_nested_as_deep_as_schemas():
    for template in (None, chat_templates.QWEN_TOOLS):
        engine = engine_that("x")
        body = {**call_with(json.dumps(nested(64))), "tools": [tool_with(nested(64))]}
        answer = await post(engine, template, **body)
        assert answer.status_code == 200, answer.text
        assert prompt_of(engine).count(json.dumps(nested(64))) == 2


async def test_a_bare_form_of_calls_excludes_json_content():
    answer = await post(engine_that("x"), chat_templates.LLAMA, response_format={"type": "json_object"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


VARIABLES = (
    "{{ documents }}{{ reasoning_effort }}{{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
)


async def test_documents_and_variables_reach_a_template_that_takes_them():
    engine = engine_that("x")
    body = {
        "tools": None,
        "documents": [{"text": "Rain."}],
        "reasoning_effort": "high",
        "chat_template_kwargs": {"enable_thinking": False, "other": 1, "self": 2},
    }
    answer = await post(engine, VARIABLES, **body)
    assert prompt_of(engine) == "[{'text': 'Rain.'}]highFalseWeather?"
    assert unquote(answer.headers["x-octavo-ignored-fields"]) == "chat_template_kwargs.other,chat_template_kwargs.self"


async def test_the_final_message_is_continued_and_echoed():
    begun = {"role": "assistant", "content": "Dear "}
    for echo in (False, True):
        engine = engine_that("Ann")
        body = {"tools": None, "messages": [USER, begun], "continue_final_message": True, "echo": echo}
        whole = (await post(engine, **body)).json()["choices"][0]["message"]["content"]
        assert prompt_of(engine).endswith("<|im_start|>assistant\nDear ")
        assert whole == ("Dear Ann" if echo else "Ann")
        events = events_of(await post(engine_that("Ann"), stream=True, **body))
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == whole


async def test_the_assistants_turn_is_not_begun_if_nobody_wants_it():
    engine = engine_that("x")
    await post(engine, tools=None, add_generation_prompt=False)
    assert prompt_of(engine).endswith("Weather?<|im_end|>\n")


async def test_special_tokens_are_added_on_request():
    for wanted in (True, False):
        engine = engine_that("x")
        async with client_of(make_app(engine, tokenizer=byte_tokenizer(adds_bos=True))) as client:
            body = {"messages": [USER], "add_special_tokens": wanted}
            await client.post("/v1/chat/completions", json=body)
        assert list(engine.submitted[0].prompt_token_ids[:2]) == ([256, 256] if wanted else [256, ord("u")])


async def test_a_failing_template_says_where():
    answer = await post(engine_that("x"), "{{ tools }}<tool_call>\n\n{{ messages[0].nothing.more }}")
    assert answer.status_code == 400
    assert "line 3: " in answer.json()["error"]["message"]


class City(pydantic.BaseModel):
    city: str


async def test_the_official_client_parses_strict_functions():
    tool = openai.pydantic_function_tool(City, name="get_weather")
    client = openai_client(engine_that(write(HERMES, CALLS[:1])))
    parsed = await client.chat.completions.parse(model="byte-model", messages=[USER], tools=[tool])
    assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == City(city="Köln 😀")
