"""`/v1/chat/completions` against a scripted engine, and both routes through OpenAI's own client."""

from urllib.parse import unquote

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.server.doubles import EOS, FakeEngine, byte_tokenizer, client_of, make_app, says
from tests.server.test_completions import events_of

USER = {"role": "user", "content": "Hi"}


async def post_chat(engine: FakeEngine, **body: object):
    async with client_of(make_app(engine)) as client:
        return await client.post("/v1/chat/completions", json={"messages": [USER], **body})


def openai_client(engine: FakeEngine, **settings: object) -> openai.AsyncOpenAI:
    transport = httpx2.ASGITransport(make_app(engine, **settings))
    return openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="k", http_client=httpx2.AsyncClient(transport=transport), max_retries=0
    )


async def test_answer_has_openai_shape():
    response = await post_chat(FakeEngine(says("Hello")))
    answer = response.json()
    ChatCompletion.model_validate(answer, strict=True)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["completion_tokens"] == 6


async def test_messages_go_through_the_template_without_special_tokens_added():
    engine = FakeEngine()
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "c", "name": "ann"},
    ]
    await post_chat(engine, messages=messages)
    text = byte_tokenizer().decode(engine.submitted[0].prompt_token_ids)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_only_a_plain_prompt_gets_the_models_first_token():
    engine = FakeEngine()
    async with client_of(make_app(engine, tokenizer=byte_tokenizer(adds_bos=True))) as client:
        await client.post("/v1/chat/completions", json={"messages": [USER]})
        answer = await client.post(
            "/v1/completions", json={"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 1}
        )
    chat, plain = (list(message.prompt_token_ids) for message in engine.submitted)
    assert chat[:2] == [256, ord("u")]
    assert plain == [256, 97, 98]
    choice = answer.json()["choices"][0]
    assert choice["text"] == "abb"
    assert choice["logprobs"]["tokens"] == ["<|im_start|>", "a", "b", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]


async def test_max_tokens_defaults_to_the_rest_of_the_window():
    engine = FakeEngine()
    await post_chat(engine)
    message = engine.submitted[0]
    assert len(message.prompt_token_ids) + message.params.max_tokens == 256


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_max_tokens(name):
    engine = FakeEngine(says("x" * 50))
    response = await post_chat(engine, **{name: 3})
    assert response.json()["choices"][0]["message"]["content"] == "xxx"


async def test_logprobs():
    response = await post_chat(FakeEngine(says("\u00e9")), logprobs=True, top_logprobs=2)
    answer = response.json()
    ChatCompletion.model_validate(answer, strict=True)
    content = answer["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "bytes:\\xc3",
        "logprob": -0.5,
        "bytes": [0xC3],
        "top_logprobs": [
            {"token": "bytes:\\xc3", "logprob": -0.5, "bytes": [0xC3]},
            {"token": "bytes:\\xc4", "logprob": -1.5, "bytes": [0xC4]},
        ],
    }
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "\u00e9"


async def test_stream_chunks():
    response = await post_chat(FakeEngine(says("ab")), stream=True, n=2, stream_options={"include_usage": True})
    chunks = events_of(response)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    *pieces, last = chunks
    for index in range(2):
        choices = [chunk["choices"][0] for chunk in pieces if chunk["choices"][0]["index"] == index]
        assert [choice["delta"] for choice in choices] == [{"role": "assistant", "content": "a"}, {"content": "b"}, {}]
        assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
    assert all(chunk["usage"] is None for chunk in pieces)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6


async def test_empty_answer_still_says_who_speaks():
    chunks = events_of(await post_chat(FakeEngine(says("")), stream=True))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}]


async def test_model_without_a_template_refuses_chat():
    app = make_app(FakeEngine(), tokenizer=byte_tokenizer(chat_template=None))
    async with client_of(app) as client:
        response = await client.post("/v1/chat/completions", json={"messages": [USER]})
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


async def test_template_that_refuses_the_messages_is_the_callers_error():
    template = "{{ raise_exception('Roles must alternate') }}"
    app = make_app(FakeEngine(), tokenizer=byte_tokenizer(template))
    async with client_of(app) as client:
        response = await client.post("/v1/chat/completions", json={"messages": [USER]})
    assert response.status_code == 400
    assert "Roles must alternate" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "messages"


async def test_openai_client_chat():
    client = openai_client(FakeEngine(says("Hello")))
    whole = await client.chat.completions.create(model="byte-model", messages=[USER])
    assert whole.choices[0].message.content == "Hello"
    stream = await client.chat.completions.create(
        model="byte-model", messages=[USER], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
    assert chunks[-1].usage == whole.usage


async def test_openai_client_completions():
    client = openai_client(FakeEngine(says("Hello")))
    whole = await client.completions.create(model="byte-model", prompt="x", echo=True, logprobs=1)
    assert whole.choices[0].text == "xHello"
    stream = await client.completions.create(model="byte-model", prompt="x", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello"
    assert [model.id async for model in await client.models.list()] == ["byte-model"]
    assert (await client.models.retrieve("byte-model")).id == "byte-model"


async def test_openai_client_errors():
    engine = FakeEngine(says("Hello"))
    client = openai_client(engine)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model="byte-model", prompt="")
    assert (refused.value.param, refused.value.type) == ("prompt", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="other", prompt="x")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.AuthenticationError):
        await openai_client(engine, api_key=("another",)).models.list()
    engine.dies_after = 2
    with pytest.raises(openai.APIError, match="The engine process died"):
        async for _ in await client.completions.create(model="byte-model", prompt="x", stream=True):
            pass
    engine.is_down = True
    with pytest.raises(openai.InternalServerError) as down:
        await client.completions.create(model="byte-model", prompt="x")
    assert down.value.status_code == 503


async def test_ignored_fields_of_messages_and_parts_are_named():
    part = {"type": "text", "text": "a", "cache_control": {}}
    messages = [{"role": "user", "content": "b", "mood": 1}, {"role": "user", "content": [part], "refusal": None}]
    response = await post_chat(FakeEngine(), messages=messages, top_k=1)
    assert response.status_code == 200, response.text
    named = unquote(response.headers["x-octavo-ignored-fields"])
    assert named == "messages[0].mood,messages[1].content[0].cache_control"


async def test_return_token_ids_gives_the_ids_of_prompt_and_answer():
    body = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True}
    engine = FakeEngine(says("xy"))
    whole = (await post_chat(engine, **body)).json()
    assert whole["choices"][0]["token_ids"] == [*b"xy", EOS]
    assert whole["prompt_token_ids"] == engine.submitted[0].prompt_token_ids
    chunks = events_of(await post_chat(FakeEngine(says("xy")), stream=True, **body))
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == [*b"xy", EOS]
