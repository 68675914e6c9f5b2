"""Every way in which a request can be wrong, and what its sender is told. None of them reaches the engine."""

import json

import pytest
from msgspec.structs import replace

from scheduler.output import SequenceFailure
from tests.server.doubles import FakeEngine, byte_tokenizer, client_of, make_app, says

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_SEQUENCE_FIELDS = [
    ("max_tokens", -1, "greater than or equal to 0"),
    ("max_tokens", 2**63, "less than or equal to"),
    ("max_tokens", 1.5, "valid integer"),
    ("max_tokens", "5", "valid integer"),
    ("max_tokens", True, "valid integer"),
    ("max_completion_tokens", -1, "greater than or equal to 0"),
    ("temperature", -0.1, "greater than or equal to 0"),
    ("temperature", 999999, "less than or equal to 2"),
    ("temperature", "1", "valid number"),
    ("temperature", True, "valid number"),
    ("temperature", float("nan"), "finite number"),
    ("temperature", float("inf"), "finite number"),
    ("top_p", -0.1, "greater than or equal to 0"),
    ("top_p", 1.1, "less than or equal to 1"),
    ("top_p", float("nan"), "finite number"),
    ("top_k", -2, "greater than or equal to -1"),
    ("top_k", 1.5, "valid integer"),
    ("min_p", -0.1, "greater than or equal to 0"),
    ("min_p", 2, "less than or equal to 1"),
    ("seed", 2**63, "less than or equal to"),
    ("seed", "1", "valid integer"),
    ("n", 0, "greater than or equal to 1"),
    ("n", 129, "less than or equal to 128"),
    ("n", True, "valid integer"),
    ("stop", "", "must not be empty"),
    ("stop", ["a", ""], "must not be empty"),
    ("stop", [1], "list of strings"),
    ("stop", {"a": 1}, "list of strings"),
    ("stop", ["x"] * 17, "at most 16"),
    ("stop", ["\u20ac" * 342], "at most 1024 bytes"),
    ("stop_token_ids", [2**31], "0 to 257"),
    ("stop_token_ids", [-1], "0 to 257"),
    ("stop_token_ids", [258], "0 to 257"),
    ("stop_token_ids", [True], "token ids"),
    ("stop_token_ids", 5, "token ids"),
    ("stop_token_ids", [1] * 1025, "at most 1024"),
    ("ignore_eos", 1, "valid boolean"),
    ("stream", "true", "valid boolean"),
    ("stream_options", {"include_usage": True}, "stream to be true"),
    ("model", 5, "valid string"),
    ("logit_bias", {"9999999": 5}, "0 to 257"),
    ("presence_penalty", 2.1, "less than or equal to 2"),
    ("frequency_penalty", -3, "greater than or equal to -2"),
    ("repetition_penalty", 0, "greater than or equal to 0.01"),
    ("response_format", "json_object", "must be an object"),
    ("min_tokens", -1, "greater than or equal to 0"),
    ("use_beam_search", 1, "valid boolean"),
    ("beam_width", 33, "less than or equal to 32"),
    ("beam_width", 2, "needs use_beam_search"),
    ("length_penalty", 11, "less than or equal to 10"),
    ("length_penalty", 0.5, "needs use_beam_search"),
    ("early_stopping", "never", "valid boolean"),
    ("early_stopping", True, "needs use_beam_search"),
    ("guided_json", 5, "a JSON schema is"),
    ("guided_choice", [], "at least 1 item"),
    ("repeat_penalty", 1.1, "not supported"),
]
_COMPLETION_FIELDS = [
    ("prompt", "", "must not be empty"),
    ("prompt", [], "must not be empty"),
    ("prompt", [""], "must not be empty"),
    ("prompt", [[]], "must not be empty"),
    ("prompt", ["a", ""], "must not be empty"),
    ("prompt", [[1], []], "must not be empty"),
    ("prompt", None, "must be given"),
    ("prompt", 5, "must be a string"),
    ("prompt", {"text": "a"}, "must be a string"),
    ("prompt", [None], "strings or lists of token ids"),
    ("prompt", [1.0], "strings or lists of token ids"),
    ("prompt", [True], "strings or lists of token ids"),
    ("prompt", [1, "a"], "token ids only"),
    ("prompt", [[1, True]], "token ids only"),
    ("prompt", [-1], "0 to 257"),
    ("prompt", [258], "0 to 257"),
    ("prompt", [[1], [2**70]], "0 to 257"),
    ("prompt", ["a"] * 2049, "at most 2048"),
    ("logprobs", 21, "less than or equal to 20"),
    ("logprobs", -1, "greater than or equal to 0"),
    ("logprobs", True, "valid integer"),
    ("echo", "yes", "valid boolean"),
    ("best_of", 0, "greater than or equal to 1"),
    ("suffix", "x", "cannot fill a gap"),
]
_CHAT_FIELDS = [
    ("messages", [], "at least 1 item"),
    ("messages", None, "valid array"),
    ("messages", "hello", "valid array"),
    ("logprobs", 1, "valid boolean"),
    ("top_logprobs", 3, "logprobs to be true"),
    ("tools", {}, "valid array"),
    ("tool_choice", "required", "needs tools"),
    ("functions", [{}], "use tools"),
    ("modalities", ["text", "audio"], "not supported"),
    ("audio", {"voice": "x"}, "not supported"),
    ("store", True, "not supported"),
    ("chat_template", "{{ x }}", "never taken from a request"),
]
_MESSAGES = [
    ({}, "messages[0].role", "required"),
    ({"role": "robot", "content": "a"}, "messages[0].role", "'assistant'"),
    ({"role": "tool", "content": "a"}, "messages[0].tool_call_id", "required"),
    ({"role": "user"}, "messages[0].content", "required"),
    ({"role": "user", "content": 5}, "messages[0].content", "string or a list"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content", "no images"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content", "no images"),
    ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].id", "required"),
    ("hello", "messages[0]", "must be an object"),
]


async def post(path: str, content: bytes, engine: FakeEngine | None = None, **settings: object):
    async with client_of(make_app(engine or FakeEngine(), **settings)) as client:
        return await client.post(path, content=content)


async def refused(path: str, body: object) -> dict:
    engine = FakeEngine()
    response = await post(path, json.dumps(body).encode(), engine)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["type"] == "invalid_request_error"
    assert engine.submitted == []
    return error


@pytest.mark.parametrize(("field", "value", "message"), [*_SEQUENCE_FIELDS, *_COMPLETION_FIELDS])
async def test_completion_field(field, value, message):
    error = await refused(COMPLETIONS, {"prompt": "abc", field: value})
    assert error["param"] == field
    assert message in error["message"]


@pytest.mark.parametrize(("field", "value", "message"), [*_SEQUENCE_FIELDS, *_CHAT_FIELDS])
async def test_chat_field(field, value, message):
    error = await refused(CHAT, {"messages": [{"role": "user", "content": "a"}], field: value})
    assert error["param"] == field
    assert message in error["message"]


@pytest.mark.parametrize(("message", "param", "text"), _MESSAGES)
async def test_chat_message(message, param, text):
    error = await refused(CHAT, {"messages": [message]})
    assert error["param"] == param
    assert text in error["message"]


async def test_missing_field():
    assert (await refused(COMPLETIONS, {"max_tokens": 1}))["param"] == "prompt"
    assert (await refused(CHAT, {"max_tokens": 1}))["param"] == "messages"


async def test_an_unknown_field_where_others_would_change_the_answer():
    error = await refused(COMPLETIONS, {"prompt": "a", "response_format": {"type": "text", "foo": 1}})
    assert (error["param"], error["message"]) == ("response_format.foo", "There is no field response_format.foo.")


async def test_contradicting_max_tokens():
    body = {"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2}
    assert (await refused(COMPLETIONS, body))["param"] == "max_completion_tokens"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0),
        ("frequency_penalty", 0.0),
        ("repetition_penalty", 1.0),
        ("logit_bias", {}),
        ("response_format", {"type": "text"}),
        ("best_of", 1),
        ("suffix", ""),
        ("temperature", 2),
        ("top_k", -1),
        ("n", 1),
        ("max_completion_tokens", 1),
    ],
)
async def test_neutral_value_is_taken(field, value):
    response = await post(COMPLETIONS, json.dumps({"prompt": "a", field: value}).encode())
    assert response.status_code == 200, response.text
    assert "x-octavo-ignored-fields" not in response.headers


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "a"', "not valid JSON"),
        (b"prompt=a", "not valid JSON"),
        (b'\xff{"prompt": "a"}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "out of range"),
        (b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion limit"),
        (b"[]", "must be an object"),
        (b"null", "must be an object"),
        (b'"prompt"', "must be an object"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_body_that_is_no_request(path, body, message):
    response = await post(path, body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["param"] is None


@pytest.mark.parametrize(
    ("body", "param", "numbers"),
    [
        ({"prompt": "a" * 257}, "prompt", ["257", "256"]),
        ({"prompt": [1] * 257}, "prompt", ["257", "256"]),
        ({"prompt": "a" * 10_000_000}, "prompt", ["at least", "256"]),
        ({"prompt": "a" * 256}, "prompt", ["256"]),
        ({"prompt": "a" * 200, "max_tokens": 57}, "max_tokens", ["200", "57", "257", "256"]),
        ({"prompt": "a" * 200, "max_completion_tokens": 2**62}, "max_completion_tokens", ["200", "256"]),
        ({"prompt": ["a", "a" * 257]}, "prompt", ["257", "256"]),
    ],
)
async def test_what_does_not_fit_the_window(body, param, numbers):
    error = await refused(COMPLETIONS, body)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert all(number in error["message"] for number in numbers)


async def test_what_just_fits_the_window():
    for body in ({"prompt": "a" * 200, "max_tokens": 56}, {"prompt": "a" * 256, "max_tokens": 0, "echo": True}):
        assert (await post(COMPLETIONS, json.dumps(body).encode())).status_code == 200


async def test_chat_that_does_not_fit_the_window():
    error = await refused(CHAT, {"messages": [{"role": "user", "content": "secret" + "a" * 512}]})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_too_many_answers_at_once():
    assert (await refused(COMPLETIONS, {"prompt": ["a"] * 100, "n": 100}))["param"] == "n"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_unknown_model_is_named(path):
    body = {"model": "gpt-4", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    response = await post(path, json.dumps(body).encode())
    error = response.json()["error"]
    assert response.status_code == 404
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "gpt-4" in error["message"]


async def test_every_served_name_is_taken_and_given_back():
    app = make_app(FakeEngine(), served_model_name=("a", "org/b"))
    async with client_of(app) as client:
        for name, shown in (("a", "a"), ("org/b", "org/b"), (None, "a")):
            response = await client.post(COMPLETIONS, json={"prompt": "x", "model": name})
            assert response.json()["model"] == shown
        assert (await client.get("/v1/models/org/b")).json()["id"] == "org/b"
        assert (await client.get("/v1/models/c")).status_code == 404


async def test_body_over_the_limit_is_refused_and_not_read_to_its_end():
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1
            assert sent < 100, "the server reads on"
            yield b" " * 1024

    async with client_of(make_app(FakeEngine(), max_body_size=8192)) as client:
        response = await client.post(COMPLETIONS, content=endless())
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        response = await client.post(COMPLETIONS, content=b" " * 8193)
        assert response.status_code == 413
        body = json.dumps({"prompt": "a"}).encode()
        assert (await client.post(COMPLETIONS, content=body + b" " * (8192 - len(body)))).status_code == 200


async def test_paths_and_methods_that_do_not_exist():
    async with client_of(make_app(FakeEngine())) as client:
        missing = await client.get("/v1/nothing")
        wrong = await client.get(COMPLETIONS)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize("streamed", [False, True])
async def test_engine_refusal_is_the_callers_error(streamed):
    engine = FakeEngine()
    engine.rejects = "It needs 99 KV blocks; the whole cache has 4."
    response = await post(COMPLETIONS, json.dumps({"prompt": ["a", "b"], "stream": streamed}).encode(), engine)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "max_tokens")
    assert "99 KV blocks" in error["message"]
    assert engine.open_requests == []


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("state", ["down", "lacking"])
async def test_engine_that_is_down_or_lacks_something_asks_to_come_again(streamed, state):
    engine = FakeEngine()
    engine.is_down = state == "down"
    engine.lacks = "No memory for the grammar." if state == "lacking" else None
    response = await post(COMPLETIONS, json.dumps({"prompt": "a", "stream": streamed}).encode(), engine)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("service_unavailable", None)


@pytest.mark.parametrize("state", ["loading", "draining"])
async def test_engine_that_takes_no_requests(state):
    engine = FakeEngine()
    if state == "loading":
        engine.info = None
    engine.draining = state == "draining"
    response = await post(COMPLETIONS, b'{"prompt": "a"}', engine)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"


async def test_engine_that_dies_answers_503():
    engine = FakeEngine(says("abcdef"))
    engine.dies_after = 3
    response = await post(COMPLETIONS, b'{"prompt": ["a", "b"]}', engine)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_died")
    assert engine.open_requests == []


async def test_engine_that_dies_in_a_stream_ends_it_with_an_error_event():
    engine = FakeEngine(says("abcdef"))
    engine.dies_after = 3
    response = await post(COMPLETIONS, b'{"prompt": "a", "stream": true}', engine)
    *pieces, last, end = response.text.split("\n\n")
    assert len(pieces) == 3
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_died"
    assert (end, "[DONE]" in response.text) == ("", False)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("text", "streamed"), [("abc", False), ("", True), ("abc", True)])
async def test_a_request_that_cannot_be_gone_on_with_is_told_why(path, text, streamed):
    engine = FakeEngine(says(text))
    engine.failure = SequenceFailure("After 3 tokens, guided_json takes too much.", "guided_json")
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "stream": streamed}
    response = await post(path, json.dumps(body).encode(), engine)
    answer = response.text
    if text and streamed:
        *pieces, answer, end = answer.split("\n\n")
        assert (len(pieces) >= 3, end) == (True, "")
    assert response.status_code == (200 if text and streamed else 400)
    assert json.loads(answer.removeprefix("data: "))["error"] == {
        "message": "After 3 tokens, guided_json takes too much.",
        "type": "invalid_request_error",
        "param": "guided_json",
        "code": None,
    }
    assert engine.open_requests == []


async def test_a_failure_that_is_not_the_requests_is_ours(caplog):
    engine = FakeEngine(says("abc"))
    engine.failure = SequenceFailure("secret detail")
    response = await post(COMPLETIONS, b'{"prompt": "a"}', engine)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in response.text
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_fault_of_ours_tells_nothing_of_the_inside(streamed, caplog):
    def broken(_message, _index):
        raise RuntimeError("secret detail")

    engine = FakeEngine()
    engine.submit = broken  # type: ignore[method-assign]
    response = await post(COMPLETIONS, json.dumps({"prompt": "a", "stream": streamed}).encode(), engine)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "broken" not in response.text
    assert "secret" not in response.text
    assert any(record.exc_info for record in caplog.records), "and the log tells all of it"


async def test_special_tokens_in_a_prompt_are_special():
    engine = FakeEngine()
    await post(COMPLETIONS, json.dumps({"prompt": "<|im_start|>a"}).encode(), engine)
    assert engine.submitted[0].prompt_token_ids == byte_tokenizer().encode("<|im_start|>a") == [256, 97]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_special_token_that_the_model_has_no_embedding_for(path):
    engine = FakeEngine()
    engine.info = replace(engine.info, vocab_size=257)
    app = make_app(engine, tokenizer=byte_tokenizer("{{ messages[0].content }}"))
    async with client_of(app) as client:
        for text, status in (("a <|im_start|> b", 200), ("a <|im_end|> b", 400)):
            body = {"prompt": text, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
            response = await client.post(path, json=body)
            assert response.status_code == status
    error = response.json()["error"]
    param = "prompt" if path == COMPLETIONS else "messages"
    assert error["param"] == param
    assert error["message"] == f"{param} contains a token, '<|im_end|>', that the model has no embedding for."
    assert len(engine.submitted) == 1
