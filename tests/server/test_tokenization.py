"""`/tokenize` and `/detokenize`: the same tokens that prompts get, in vLLM's and llama.cpp's forms, there and back."""

import json
from urllib.parse import unquote

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from server import tokenization
from server.protocol.tokenization import MAX_TOKENS
from tests.data_files import emoji, mgsm_prompts, naughty_strings
from tests.server.doubles import MAX_MODEL_LEN, FakeEngine, byte_tokenizer, client_of, make_app
from tests.server.real_tokenizers import gemma3, smollm2

CHAT = [{"role": "user", "content": "Hi"}]
CHAT_TEXT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


async def post(path: str, tokenizer=None, **body: object) -> httpx.Response:
    engine = FakeEngine()
    async with client_of(make_app(engine, tokenizer=tokenizer)) as client:
        response = await client.post(path, content=json.dumps(body))
    assert engine.submitted == []
    return response


async def answer(path: str, tokenizer=None, **body: object) -> dict:
    response = await post(path, tokenizer, **body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_prompt_is_answered_as_vllm_does():
    assert await answer("/tokenize", prompt="ab", model="byte-model") == {
        "count": 2,
        "max_model_len": MAX_MODEL_LEN,
        "tokens": [97, 98],
        "token_strs": None,
    }
    assert (await answer("/tokenize", smollm2(), prompt="It is", return_token_strs=True))["token_strs"] == ["It", "Ġis"]


@pytest.mark.parametrize(
    ("body", "has_bos"),
    [
        ({"prompt": "ab"}, True),
        ({"prompt": "ab", "add_special_tokens": None}, True),
        ({"prompt": "ab", "add_special_tokens": False}, False),
        ({"content": "ab"}, False),
        ({"content": "ab", "add_special": True}, True),
        ({"content": "ab", "add_special_tokens": True}, True),
        ({"prompt": "ab", "add_special": False}, False),
        ({"messages": CHAT}, False),  # its template writes them
    ],
)
async def test_special_tokens(body, has_bos):
    tokens = (await answer("/tokenize", byte_tokenizer(adds_bos=True), **body))["tokens"]
    assert (tokens[0] == 256) == (has_bos or "messages" in body)
    assert tokens.count(256) == (2 if "messages" in body else int(has_bos))


async def test_a_conversation_is_written_out_with_the_template():
    body = await answer("/tokenize", messages=CHAT, temperature=0.5)
    assert body["count"] == len(body["tokens"]) == len("user\nHi\nassistant\n") + 3
    assert (await answer("/detokenize", tokens=body["tokens"]))["prompt"] == CHAT_TEXT
    doubled = await answer("/tokenize", byte_tokenizer(adds_bos=True), messages=CHAT, add_special_tokens=True)
    assert doubled["tokens"] == [256, *body["tokens"]]
    without = await answer("/detokenize", tokens=body["tokens"], skip_special_tokens=True)
    assert without["content"] == "user\nHi\nassistant\n"


async def test_a_prompt_gets_the_tokens_that_the_engine_would_read():
    engine = FakeEngine()
    async with client_of(make_app(engine, tokenizer=smollm2())) as client:
        engine.info = replace(engine.info, vocab_size=smollm2().vocab_size)
        for path, body in (("completions", {"prompt": "12 naïve 日本"}), ("chat/completions", {"messages": CHAT})):
            tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
            await client.post(f"/v1/{path}", json={**body, "max_tokens": 1})
            assert list(engine.submitted[-1].prompt_token_ids) == tokens


async def test_pieces_are_texts_or_bytes_as_in_llama_cpp():
    body = await answer("/tokenize", content="aé<|im_end|>", with_pieces=True)
    assert body["tokens"] == [
        {"id": 97, "piece": "a"},
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA9, "piece": [0xA9]},
        {"id": 257, "piece": "<|im_end|>"},
    ]
    chat = await answer("/tokenize", messages=CHAT, with_pieces=True)
    assert "".join(token["piece"] for token in chat["tokens"]) == CHAT_TEXT


async def test_an_empty_text_has_no_tokens():
    assert (await answer("/tokenize", prompt=""))["count"] == 0
    assert await answer("/detokenize", tokens=[]) == {"prompt": "", "content": ""}


async def test_a_text_may_be_longer_than_the_window():
    text = "x" * (3 * MAX_MODEL_LEN)
    assert (await answer("/tokenize", prompt=text))["count"] == 3 * MAX_MODEL_LEN
    assert (await answer("/tokenize", messages=[{"role": "user", "content": text}]))["count"] > 3 * MAX_MODEL_LEN


_TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from([*naughty_strings(), *emoji()[::40], *(t for ts in mgsm_prompts().values() for t in ts[:1])]),
)


@pytest.fixture(scope="module")
def apps():
    return [make_app(FakeEngine(), tokenizer=tokenizer) for tokenizer in (byte_tokenizer(), gemma3())]


@settings(max_examples=60, deadline=None)
@given(text=_TEXTS)
async def test_there_and_back(apps, text):
    for app in apps:
        async with client_of(app) as client:
            tokens = (await client.post("/tokenize", json={"content": text})).json()["tokens"]
            back = (await client.post("/detokenize", json={"tokens": tokens})).json()
        assert back == {"prompt": text, "content": text}


async def test_bytes_that_are_no_text_become_the_replacement_character():
    assert (await answer("/detokenize", tokens=[0xC3, 97]))["prompt"] == "\ufffda"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "prompt", "One of prompt, messages and content"),
        ({"prompt": None, "content": None, "messages": None}, "prompt", "One of"),
        ({"prompt": "a", "content": "a"}, "content", "give one"),
        ({"prompt": "a", "messages": CHAT}, "prompt", "exclude each other"),
        ({"content": "a", "messages": CHAT}, "content", "exclude each other"),
        ({"prompt": ["a"]}, "prompt", "valid string"),
        ({"prompt": [97]}, "prompt", "valid string"),
        ({"content": 5}, "content", "valid string"),
        ({"content": "a", "parse_special": False}, "parse_special", "not supported"),
        ({"content": "a", "with_pieces": 1}, "with_pieces", "valid boolean"),
        ({"prompt": "a", "return_token_strs": "yes"}, "return_token_strs", "valid boolean"),
        ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens", "valid boolean"),
        ({"prompt": "a", "add_special_tokens": True, "add_special": False}, "add_special", "must not differ"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hello"}, "messages", "array"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "'assistant'"),
        ({"messages": CHAT, "chat_template": "{{ x }}"}, "chat_template", "chat_template"),
        ({"messages": CHAT, "temperature": 3}, "temperature", "less than or equal to 2"),
    ],
)
async def test_a_wrong_request_to_tokenize_is_named(body, param, message):
    await _refused("/tokenize", body, param, message)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (None, "list of token ids"),
        ("abc", "list of token ids"),
        ([1, "a"], "list of token ids"),
        ([True], "list of token ids"),
        ([1.0], "list of token ids"),
        ([[1]], "list of token ids"),
        ([-1], "0 to 257"),
        ([258], "0 to 257"),
        ([2**70], "0 to 257"),
    ],
)
async def test_tokens_that_are_none_are_refused(tokens, message):
    await _refused("/detokenize", {"tokens": tokens}, "tokens", message)


async def _refused(path: str, body: dict, param: str, message: str) -> None:
    response = await post(path, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert message in error["message"]


async def test_the_field_of_tokens_is_required():
    response = await post("/detokenize")
    assert (response.status_code, response.json()["error"]["message"]) == (400, "tokens is required.")


async def test_texts_and_token_lists_have_bounds(monkeypatch):
    await _refused("/detokenize", {"tokens": [0] * (MAX_TOKENS + 1)}, "tokens", "at most 1048576")
    monkeypatch.setattr(tokenization, "_MIN_TEXT_LIMIT", 100)
    limit = 8 * MAX_MODEL_LEN
    assert (await answer("/tokenize", prompt="é" * (limit // 2)))["count"] == limit
    await _refused("/tokenize", {"prompt": "é" * (limit // 2) + "x"}, "prompt", f"at most {limit}")
    long = [{"role": "user", "content": "x" * limit}]
    await _refused("/tokenize", {"messages": long}, "messages", f"at most {limit}")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_names_and_unknown_fields(path):
    body = {"prompt": "a"} if path == "/tokenize" else {"tokens": [97]}
    response = await post(path, **body, mystery=1)
    assert response.headers["x-octavo-ignored-fields"] == "mystery"
    if path == "/tokenize":
        response = await post(path, messages=CHAT, mystery=1, chat_template_kwargs={"mood": 1})
        assert unquote(response.headers["x-octavo-ignored-fields"]) == "mystery,chat_template_kwargs.mood"
    response = await post(path, **body, model="other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_model_without_a_template_takes_no_conversation():
    response = await post("/tokenize", byte_tokenizer(chat_template=None), messages=CHAT)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


async def test_the_special_tokens_and_the_template_are_told():
    tokenizer = smollm2()
    async with client_of(make_app(FakeEngine(), tokenizer=tokenizer)) as client:
        info = (await client.get("/tokenizer_info")).json()
    assert (info["bos_token"], info["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert info["chat_template"] == tokenizer.chat_template.source
    async with client_of(make_app(FakeEngine(), tokenizer=byte_tokenizer(None))) as client:
        plain = (await client.get("/tokenizer_info")).json()
    assert plain == {"bos_token": None, "eos_token": None, "pad_token": None, "chat_template": None}
