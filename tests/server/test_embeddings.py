"""`/v1/embeddings` against a stand-in engine: vectors, encodings, bounds, refusals, and what becomes of the work."""

import asyncio
import base64
import itertools
import json
import math
import struct

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import CreateEmbeddingResponse

from scheduler.output import SequenceUpdate
from scheduler.sampling_params import SamplingParams
from server import embedding as embedding_module
from server.messages import Submit
from tests.server.doubles import HIDDEN_SIZE, MAX_MODEL_LEN, FakeEngine, byte_tokenizer, client_of, make_app, pooled
from tests.server.test_operations import metrics_of

PATH = "/v1/embeddings"


async def post(engine: FakeEngine, tokenizer=None, **body: object) -> httpx.Response:
    async with client_of(make_app(engine, tokenizer=tokenizer)) as client:
        return await client.post(PATH, content=json.dumps(body))


async def embed(engine: FakeEngine, **body: object) -> dict:
    response = await post(engine, **body)
    assert response.status_code == 200, response.text
    if body.get("encoding_format") != "base64":  # OpenAI's type knows the decoded form only
        CreateEmbeddingResponse.model_validate(response.json(), strict=True)
    return response.json()


def expected(token_ids: list[int], pooling: str = "mean", *, normalize: bool = True) -> list[float]:
    """The stand-in's hidden states, pooled, at length 1."""
    raw = pooled(Submit("", token_ids, SamplingParams(max_tokens=0, pooling=pooling), 0.0))
    values = struct.unpack(f"<{HIDDEN_SIZE}f", raw)
    return [value / (math.hypot(*values) if normalize else 1.0) for value in values]


async def test_an_answer_has_openais_shape_and_counts():
    engine = FakeEngine()
    answer = await embed(engine, input="abc", model="byte-model", user="someone")
    vector = answer["data"][0].pop("embedding")
    assert answer == {
        "object": "list",
        "model": "byte-model",
        "data": [{"object": "embedding", "index": 0}],
        "usage": {
            "prompt_tokens": 3,
            "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        },
    }
    assert vector == pytest.approx(expected([*b"abc"]), rel=1e-6)
    assert math.hypot(*vector) == pytest.approx(1.0, rel=1e-6)
    params = engine.submitted[0].params
    assert (params.pooling, params.max_tokens, params.n) == ("mean", 0, 1)
    assert engine.open_requests == []
    assert engine.aborted == []


@pytest.mark.parametrize(
    ("given_input", "prompts"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
        (["ab", [99]], [[97, 98], [99]]),
    ],
)
async def test_vectors_stand_in_the_order_of_the_inputs(given_input, prompts):
    answer = await embed(FakeEngine(), input=given_input)
    assert [item["index"] for item in answer["data"]] == [*range(len(prompts))]
    for item, prompt in zip(answer["data"], prompts, strict=True):
        assert item["embedding"] == pytest.approx(expected(prompt), rel=1e-6)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("normalize", [True, False])
async def test_pooling_and_normalisation(pooling, normalize):
    answer = await embed(FakeEngine(), input="abc", pooling=pooling, normalize=normalize)
    wanted = expected([*b"abc"], pooling, normalize=normalize)
    assert answer["data"][0]["embedding"] == pytest.approx(wanted, rel=1e-6)


async def test_special_tokens_are_added_unless_refused():
    engine = FakeEngine()
    tokenizer = byte_tokenizer(adds_bos=True)
    for flag in (None, True, False):
        await post(engine, tokenizer, input="ab", add_special_tokens=flag)
    assert [message.prompt_token_ids for message in engine.submitted] == [[256, 97, 98]] * 2 + [[97, 98]]


_FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(_FLOATS, min_size=1, max_size=64), normalize=st.booleans())
async def test_base64_and_float_carry_the_same_bits(values, normalize):
    raw = struct.pack(f"<{len(values)}f", *values)
    answers = [
        await embed(_fixed(raw), input="a", normalize=normalize, encoding_format=form) for form in ("float", "base64")
    ]
    numbers, packed = (answer["data"][0]["embedding"] for answer in answers)
    assert base64.b64decode(packed, validate=True) == struct.pack(f"<{len(values)}f", *numbers)
    if not normalize:
        assert numbers == values
    elif any(values):
        assert math.hypot(*numbers) == pytest.approx(1.0, rel=1e-4)
    else:
        assert not any(numbers)


def _fixed(raw: bytes) -> FakeEngine:
    """Whatever is asked, the hidden states are the same."""
    engine = FakeEngine()
    engine._updates = lambda message, index: [  # type: ignore[method-assign]
        SequenceUpdate(message.request_id, index, finish_reason="stop", embedding=raw)
    ]
    return engine


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_hidden_states_that_are_no_numbers_are_our_fault(value):
    response = await post(_fixed(struct.pack("<2f", 1.0, value)), input="a")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")


async def test_openais_client_decodes_both_forms():
    app = make_app(FakeEngine())
    async with (
        client_of(app) as transport,
        openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=transport) as client,
    ):
        by_default = await client.embeddings.create(model="byte-model", input=["abc", "d"])  # base64
        plain = await client.embeddings.create(model="byte-model", input=["abc", "d"], encoding_format="float")
    assert [item.embedding for item in by_default.data] == [item.embedding for item in plain.data]
    assert by_default.usage.total_tokens == 4


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("input", None, "must be given"),
        ("input", "", "must not be empty"),
        ("input", [], "must not be empty"),
        ("input", [""], "must not be empty"),
        ("input", [[]], "must not be empty"),
        ("input", 5, "must be a string"),
        ("input", {"text": "a"}, "must be a string"),
        ("input", [None], "strings or lists of token ids"),
        ("input", [1, "a"], "token ids only"),
        ("input", [[1, True]], "token ids only"),
        ("input", [-1], "0 to 257"),
        ("input", [2**70], "0 to 257"),
        ("input", ["a", [258]], "0 to 257"),
        ("input", ["a"] * 2049, "at most 2048"),
        ("encoding_format", "hex", "'float' or 'base64'"),
        ("encoding_format", 1, "'float' or 'base64'"),
        ("dimensions", 3, "is 3, but the model's vectors have 4"),
        ("dimensions", 0, "greater than or equal to 1"),
        ("dimensions", True, "valid integer"),
        ("dimensions", 4.0, "valid integer"),
        ("dimensions", 2**63, "less than or equal to"),
        ("pooling", "cls", "'mean' or 'last'"),
        ("normalize", 1, "valid boolean"),
        ("add_special_tokens", "yes", "valid boolean"),
        ("model", 5, "valid string"),
        ("truncate_prompt_tokens", 0, "at least 1"),
        ("truncate_prompt_tokens", 257, "window is 256"),
        ("truncate_prompt_tokens", True, "valid integer"),
        ("priority", 1.5, "valid integer"),
        ("priority", 2**40, "less than or equal to"),
        ("user", 5, "valid string"),
        ("messages", [{"role": "user", "content": "a"}], "not supported"),
        ("embed_dtype", "float16", "not supported"),
        ("use_activation", False, "not supported"),
    ],
)
async def test_a_wrong_field_is_named(field, value, message):
    engine = FakeEngine()
    response = await post(engine, **{"input": "abc", field: value})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, field, "invalid_request_error")
    assert message in error["message"]
    assert engine.submitted == []


async def test_dimensions_may_be_the_models_own_and_unknown_fields_are_reported():
    response = await post(FakeEngine(), input="abc", dimensions=HIDDEN_SIZE, encoding_format=None, mystery=1)
    assert response.status_code == 200
    assert response.headers["x-octavo-ignored-fields"] == "mystery"


async def test_another_model_is_not_found():
    response = await post(FakeEngine(), input="abc", model="text-embedding-3-small")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("given_input", ["x" * 257, [0] * 257, ["a", "x" * 257]])
async def test_an_input_over_the_window_is_refused_not_cut(given_input):
    engine = FakeEngine()
    response = await post(engine, input=given_input)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
    assert engine.submitted == []


async def test_an_input_is_cut_on_request_and_that_is_reported():
    engine = FakeEngine()
    for limit, kept in ((2, [*b"cd"]), (-1, [*b"abcd"]), (None, [*b"abcd"])):
        response = await post(engine, input=["abcd"], truncate_prompt_tokens=limit)
        assert response.status_code == 200
        assert engine.submitted[-1].prompt_token_ids == kept
        assert response.headers.get("x-octavo-truncated-prompt-tokens") == ("2" if limit == 2 else None)
    response = await post(engine, input=["x" * 300, [7] * 260], truncate_prompt_tokens=-1)
    assert [len(message.prompt_token_ids) for message in engine.submitted[-2:]] == [MAX_MODEL_LEN] * 2
    assert response.headers["x-octavo-truncated-prompt-tokens"] == "48"
    assert response.json()["usage"]["prompt_tokens"] == 2 * MAX_MODEL_LEN


async def test_priority_reaches_the_engine():
    engine = FakeEngine()
    await embed(engine, input="a")
    await embed(engine, input="a", priority=-3)
    assert [message.priority for message in engine.submitted] == [0, -3]


async def test_a_request_has_a_bound_on_its_tokens(monkeypatch):
    monkeypatch.setattr(embedding_module, "_MAX_TOKENS_OF_REQUEST", 600)
    engine = FakeEngine()
    assert (await post(engine, input=["x" * 200] * 3)).status_code == 200
    response = await post(engine, input=["x" * 200] * 3 + ["y"])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")
    assert "600 tokens" in response.json()["error"]["message"]
    assert len(engine.submitted) == 3


async def test_an_input_that_fills_the_window_is_served():
    answer = await embed(FakeEngine(), input="x" * MAX_MODEL_LEN)
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN


async def test_a_refusal_of_the_engine_ends_the_whole_request():
    engine = FakeEngine()
    engine.rejects = "The prompt does not fit."
    response = await post(engine, input=["a", "b", "c"])
    assert (response.status_code, response.json()["error"]["message"]) == (400, "The prompt does not fit.")
    assert engine.open_requests == []


async def test_a_dead_engine_is_reported_and_what_was_open_is_counted():
    engine = FakeEngine()
    engine.dies_after = 1
    async with client_of(make_app(engine)) as client:
        response = await client.post(PATH, json={"input": ["a", "b", "c"]})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_died")
        ended = await metrics_of(client)
    counts = {
        dict(key[1:])["finished_reason"]: value
        for key, value in ended.items()
        if key[0] == "vllm:request_success_total"
    }
    assert counts == {"stop": 1, "error": 2, "abort": 0, "length": 0, "repetition": 0}
    assert engine.open_requests == []


async def test_a_sequence_that_fails_is_our_fault():
    engine = FakeEngine()
    engine._updates = lambda message, index: [SequenceUpdate(message.request_id, index, finish_reason="error")]  # type: ignore[method-assign]
    assert (await post(engine, input="a")).status_code == 500


async def test_nothing_stays_in_the_engine_when_the_client_leaves():
    engine = FakeEngine(step_seconds=60)
    app = make_app(engine)
    async with client_of(app) as client:
        request = asyncio.create_task(client.post(PATH, json={"input": ["a", "b", "c"]}))
        while len(engine.open_requests) < 3:
            await asyncio.sleep(0.001)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    assert engine.open_requests == []
    assert len(engine.aborted) == 3


async def test_many_inputs_let_other_requests_in_between():
    """Two thousand prompts are not submitted in one go."""
    engine = FakeEngine()
    app = make_app(engine)
    seen = []
    async with client_of(app) as client:
        request = asyncio.create_task(client.post(PATH, json={"input": ["a"] * 2048}))
        while not request.done():
            await asyncio.sleep(0)
            seen.append(len(engine.submitted))
    assert request.result().status_code == 200
    assert len(request.result().json()["data"]) == 2048
    assert max(after - before for before, after in itertools.pairwise(seen)) < 64
