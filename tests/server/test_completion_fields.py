"""Each field of `/v1/completions` beyond the plainest: what it does to the engine's request and to the answer."""

import json
from dataclasses import replace

import msgspec
import pytest
from openai.types import Completion

from server.errors import InvalidRequest
from server.preparation import prepare_completion
from server.served_model import ServedModel, longest_token
from tests.server.doubles import EOS, FakeEngine, byte_tokenizer, client_of, make_app, says
from tests.server.real_tokenizers import smollm2
from tests.server.test_completions import complete, fold, stream

_SERVED = ServedModel(("m",), byte_tokenizer(), longest_token(byte_tokenizer()), vocab_size=258, max_model_len=8192)


def prepare(model: ServedModel = _SERVED, **body: object):
    return prepare_completion(json.dumps({"prompt": "ab", **body}).encode(), model)


def refusal(model: ServedModel = _SERVED, **body: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        prepare(model, **body)
    return error.value


async def response_of(engine: FakeEngine, app=None, **body: object):
    async with client_of(app or make_app(engine)) as client:
        return await client.post("/v1/completions", json=body)


async def test_the_samplers_fields_reach_the_engine():
    engine = FakeEngine()
    await complete(
        engine,
        prompt=["ab", "cd"],
        max_tokens=9,
        min_tokens=2,
        presence_penalty=-2,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        logit_bias={"97": -100, "98": 7.5},
        allowed_token_ids=[97, 98, 97],
        bad_words=["no", "no"],
        priority=-3,
        seed=5,
    )
    assert [message.priority for message in engine.submitted] == [-3, -3]
    for message in engine.submitted:
        params = message.params
        assert (params.max_tokens, params.min_tokens, params.seed) == (9, 2, 5)
        assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-2.0, 1.5, 1.25)
        assert params.logit_bias == ((97, -100.0), (98, 7.5))
        assert params.allowed_token_ids == (97, 98)
        assert params.bad_words == ((*b"no",),)


def test_the_form_of_an_answer_reaches_the_engine():
    asked = prepare(structured_outputs={"choice": ["a", "b"]}, min_tokens=0).prompts[0].params.structured_output
    assert (asked.kind, asked.value) == ("choice", '["a", "b"]')


def test_bad_words_are_spelled_as_at_the_beginning_and_after_a_space():
    tokenizer = smollm2()
    model = ServedModel(("m",), tokenizer, longest_token(tokenizer), tokenizer.vocab_size, 8192)
    words = ["foo", " foo", "\n", "unbelievable", "dirty dog", "qzxj"]
    spellings = prepare(model, bad_words=words).prompts[0].params.bad_words
    texts = [tokenizer.decode(spelling) for spelling in spellings]
    spaced = ["unbelievable", " unbelievable", "dirty dog", " dirty dog", "qzxj", " qzxj"]
    assert texts == ["foo", " foo", "\n", *spaced]
    assert list(map(len, spellings)) == [1, 1, 1, 3, 2, 3, 2, 4, 4]
    # Where a space is a token of its own, the word after it is banned already.
    assert prepare(bad_words=["no"]).prompts[0].params.bad_words == (tuple(b"no"),)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logit_bias", {"258": 1}, "0 to 257"),
        ("logit_bias", {"-1": 1}, "token ids, written as numbers"),
        ("logit_bias", {"1.5": 1}, "token ids, written as numbers"),
        ("logit_bias", {"\u0663": 1}, "token ids, written as numbers"),
        ("logit_bias", {"9" * 5000: 1}, "token ids, written as numbers"),
        ("logit_bias", {"01": 1}, "leading zeros"),
        ("logit_bias", {"1": 100.5}, "from -100 to 100"),
        ("logit_bias", {"1": float("nan")}, "from -100 to 100"),
        ("logit_bias", {"1": True}, "from -100 to 100"),
        ("logit_bias", {"1": None}, "from -100 to 100"),
        ("logit_bias", {str(i): 1 for i in range(1025)}, "at most 1024"),
        ("logit_bias", [[1, 2]], "an object"),
        ("allowed_token_ids", [], "must not be empty"),
        ("allowed_token_ids", [1, 258], "0 to 257"),
        ("allowed_token_ids", [1] * 65537, "at most 65536"),
        ("bad_words", "no", "list of strings"),
        ("bad_words", [""], "must not be empty"),
        ("bad_words", ["x"] * 257, "at most 256"),
        ("bad_words", ["\u20ac" * 86], "at most 256 bytes"),
        ("min_tokens", 17, "at most"),
        ("presence_penalty", float("inf"), "finite"),
        ("frequency_penalty", True, "valid number"),
        ("repetition_penalty", -1, "greater than or equal to 0.01"),
        ("repetition_penalty", 1e9, "less than or equal to 100"),
        ("prompt_logprobs", -1, "greater than or equal to 0"),
        ("prompt_logprobs", 21, "less than or equal to 20"),
        ("truncate_prompt_tokens", 0, "-1, or at least 1"),
        ("truncate_prompt_tokens", -2, "greater than or equal to -1"),
        ("truncate_prompt_tokens", 8193, "the model's window is 8192"),
        ("priority", 2**31, "less than or equal to"),
        ("best_of", 129, "less than or equal to 128"),
        ("skip_special_tokens", 1, "valid boolean"),
        ("spaces_between_special_tokens", "no", "valid boolean"),
        ("include_stop_str_in_output", 1, "valid boolean"),
        ("timings_per_token", 1, "valid boolean"),
        ("user", 5, "valid string"),
        ("user", "x" * 1025, "at most 1024"),
        ("metadata", ["x"], "an object"),
        ("metadata", {str(i): "x" for i in range(17)}, "at most 16"),
        ("service_tier", "flex", "'auto' or 'default'"),
        ("cache_salt", "", "at least 1 character"),
        ("prompt_embeds", "AAAA", "not supported"),
        ("repeat_penalty", 1.1, "use repetition_penalty"),
        ("n_predict", 5, "use max_tokens"),
        ("mirostat", 2, "not supported"),
        ("logits_processors", ["x"], "not supported"),
    ],
)
def test_what_a_field_may_not_be(field, value, message):
    error = refusal(**{field: value})
    assert (error.param or "").startswith(field)
    assert message in error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"allowed_token_ids": [5, EOS], "stop_token_ids": [5], "min_tokens": 1}, "allowed_token_ids"),
        ({"suffix": "x", "echo": True}, "echo"),
        ({"suffix": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"guided_regex": "a", "json_schema": {}}, "json_schema"),
        ({"guided_choice": ["yes", "no"], "min_tokens": 1}, "min_tokens"),
    ],
)
def test_fields_that_exclude_each_other(body, param):
    assert refusal(**body).param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a"] * 33, "best_of": 125}, "best_of"),
        ({"prompt": ["a"] * 33, "n": 125}, "n"),
        ({"prompt": ["a"] * 8, "n": 128, "max_tokens": 4097}, "max_tokens"),
        ({"prompt": ["a"] * 8, "best_of": 128, "max_completion_tokens": 4097}, "max_completion_tokens"),
        ({"prompt": [[1] * 8000] * 128, "prompt_logprobs": 2, "max_tokens": 1}, "prompt_logprobs"),
        ({"prompt": ["a"] * 65, "bad_words": [f"{i:0256}" for i in range(256)]}, "bad_words"),
        ({"prompt": ["a"] * 2048, "structured_outputs": {"regex": "a" * 2100}}, "structured_outputs.regex"),
    ],
)
def test_what_one_request_may_ask_for_in_total(body, param):
    assert refusal(**body).param == param


def test_what_is_just_within_the_bounds_of_a_request():
    prepare(prompt=["a"] * 8, n=128, max_tokens=4096)
    prepare(prompt=["a"] * 32, best_of=128)
    prepare(prompt=[[1] * 8000] * 128, prompt_logprobs=1, max_tokens=1)


async def test_labels_and_hints_change_nothing_and_are_not_unknown():
    response = await response_of(
        FakeEngine(),
        prompt="ab",
        user="u",
        metadata={"a": "b"},
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        service_tier="auto",
        cache_salt="x",
        cache_prompt=False,
        spaces_between_special_tokens=False,
    )
    assert response.status_code == 200
    assert "x-octavo-ignored-fields" not in response.headers
    assert response.json()["choices"][0]["text"] == "ba"


# ---- what is shown


@pytest.mark.parametrize(
    ("body", "text", "stop_reason"),
    [
        ({}, "ab.c", None),
        ({"skip_special_tokens": False}, "ab<|im_start|>.c", None),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "ab<|im_start|>.c<|im_end|>", None),
        ({"include_stop_str_in_output": True}, "ab.c", None),
        ({"stop": "."}, "ab", "."),
        ({"stop": ".", "include_stop_str_in_output": True}, "ab.", "."),
        ({"stop": "b.", "min_tokens": 4}, "ab.c", None),
        ({"stop": "b.", "min_tokens": 3}, "a", "b."),
        ({"stop_token_ids": [46]}, "ab", 46),
        ({"stop_token_ids": [46], "include_stop_str_in_output": True}, "ab.", 46),
    ],
)
async def test_what_ends_an_answer_and_what_of_it_is_shown(body, text, stop_reason):
    def engine() -> FakeEngine:
        return FakeEngine(lambda _m, _i: [*b"ab", 256, *b".c", EOS])

    choice = (await complete(engine(), prompt="x", logprobs=0, **body))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", stop_reason)
    raw = b"".join(bytes(token) for token in choice["logprobs"]["bytes"])
    assert (
        raw.replace(b"<|im_start|>", b"").replace(b"<|im_end|>", b"")
        == text.replace("<|im_start|>", "").replace("<|im_end|>", "").encode()
    )
    chunks = await stream(engine(), prompt="x", logprobs=0, **body)
    assert fold(chunks) == [{name: choice[name] for name in ("text", "logprobs", "finish_reason")}]
    assert chunks[-1]["choices"][0]["stop_reason"] == stop_reason
    assert not any("stop_reason" in chunk["choices"][0] for chunk in chunks[:-1])


async def test_bytes_of_tokens_join_to_the_text():
    choice = (await complete(FakeEngine(says("日本👍🏽é")), prompt="x", logprobs=0, max_tokens=50))["choices"][0]
    assert b"".join(bytes(token) for token in choice["logprobs"]["bytes"]).decode() == choice["text"] == "日本👍🏽é"


async def test_tokens_can_be_named_by_their_ids():
    answer = await complete(FakeEngine(says("h")), prompt="ab", logprobs=2, return_tokens_as_token_ids=True, echo=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97", "token_id:98", "token_id:104"]
    assert logprobs["top_logprobs"][2] == {"token_id:104": -0.5, "token_id:105": -1.5}


@pytest.mark.parametrize("n", [1, 2])
async def test_prompt_logprobs_have_vllms_shape(n):
    engine = FakeEngine(says("x"))
    answer = await complete(engine, prompt=["AB", [0xE9, 65]], n=n, prompt_logprobs=2)
    assert engine.submitted[0].params.prompt_logprobs == 2
    assert engine.submitted[0].params.logprobs is None
    first = [None, {"66": _at(-0.5, 1, "B"), "67": _at(-1.5, 2, "C")}]
    second = [None, {"65": _at(-0.5, 1, "A"), "66": _at(-1.5, 2, "B")}]
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [first] * n + [second] * n
    assert all(choice["logprobs"] is None for choice in answer["choices"])


def _at(logprob: float, rank: int | None, text: str) -> dict:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


@pytest.mark.parametrize(("prompt_logprobs", "logprobs"), [(0, 2), (3, 1), (2, 2)])
async def test_prompt_logprobs_beside_an_echo_each_have_their_number(prompt_logprobs, logprobs):
    engine = FakeEngine()
    body = {"prompt": "ABC", "echo": True, "max_tokens": 0}
    answer = await complete(engine, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **body)
    assert engine.submitted[0].params.prompt_logprobs == max(prompt_logprobs, logprobs)
    choice = answer["choices"][0]
    assert [len(at) for at in choice["logprobs"]["top_logprobs"][1:]] == [logprobs] * 2
    assert [len(at) for at in choice["prompt_logprobs"][1:]] == [max(1, prompt_logprobs)] * 2
    assert choice["prompt_logprobs"][1]["66"]["rank"] == (1 if prompt_logprobs else None)


@pytest.mark.parametrize(("adds_bos", "num_before"), [(False, 0), (True, 1)])
async def test_echoed_special_tokens_stand_where_the_text_has_them(adds_bos, num_before):
    engine = FakeEngine(says("x"))
    app = make_app(engine, tokenizer=byte_tokenizer(adds_bos=adds_bos))
    body = {"prompt": "a<|im_start|>b", "echo": True, "logprobs": 0, "max_tokens": 1}
    choice = (await response_of(engine, app, **body)).json()["choices"][0]
    assert choice["text"] == "a<|im_start|>bx"
    assert choice["logprobs"]["text_offset"] == [0] * num_before + [0, 1, 13, 14]
    assert choice["logprobs"]["token_logprobs"][0] is None


# ---- the prompt


@pytest.mark.parametrize(
    ("prompt", "limit", "kept"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdef", 2, "ef"),
        ([97, 98, 99], 1, "c"),
        ("x" * 300, 256, "x" * 256),
        ("y" + "x" * 300, -1, "x" * 240),
    ],
)
async def test_a_prompt_is_truncated_on_request_alone_and_the_caller_is_told(prompt, limit, kept):
    engine = FakeEngine(says("!"))
    max_tokens = 16 if limit == -1 else 256 - len(kept)
    body = {"prompt": prompt, "truncate_prompt_tokens": limit, "max_tokens": max_tokens, "echo": True}
    response = await response_of(engine, **body)
    answer = response.json()
    assert engine.submitted[0].prompt_token_ids == tuple(kept.encode())
    assert answer["choices"][0]["text"] == kept + ("!" if max_tokens else "")
    num_truncated = len(prompt) - len(kept)
    assert response.headers.get("x-octavo-truncated-prompt-tokens") == (str(num_truncated) if num_truncated else None)
    assert answer["usage"]["prompt_tokens_details"].get("truncated_tokens", 0) == num_truncated
    assert answer["usage"]["prompt_tokens"] == len(kept)


async def test_truncation_keeps_what_a_prompt_begins_with():
    model = replace(_SERVED, tokenizer=byte_tokenizer(adds_bos=True))
    assert prepare(model, prompt="abcdef", truncate_prompt_tokens=3).prompts[0].token_ids == (256, *b"ef")
    assert prepare(model, prompt="abcdef", truncate_prompt_tokens=1).prompts[0].token_ids == tuple(b"f")
    plain = prepare(model, prompt="abcdef", truncate_prompt_tokens=3, add_special_tokens=False)
    assert plain.prompts[0].token_ids == tuple(b"def")


async def test_a_prompt_over_the_window_is_refused_unless_it_may_be_cut():
    assert refusal(prompt="a" * 8193).code == "context_length_exceeded"
    assert refusal(prompt="a" * (2**22 + 1), truncate_prompt_tokens=5).code == "context_length_exceeded"
    assert len(prepare(prompt="a" * 8193, truncate_prompt_tokens=-1).prompts[0].token_ids) == 8176


def test_special_tokens_before_a_prompt_can_be_left_out():
    model = replace(_SERVED, tokenizer=byte_tokenizer(adds_bos=True))
    assert prepare(model, prompt="a").prompts[0].token_ids == (256, 97)
    assert prepare(model, prompt="a", add_special_tokens=False).prompts[0].token_ids == (97,)


def test_suffix_fills_a_gap_where_the_vocabulary_can_mark_one():
    tokenizer = byte_tokenizer()
    tokenizer._backend.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])  # ids 258 to 260
    model = replace(_SERVED, tokenizer=tokenizer, vocab_size=261)
    expected = (258, *b"ab", 259, *b"cd", 260)
    assert prepare(model, prompt="ab", suffix="cd").prompts[0].token_ids == expected
    assert prepare(model, prompt=[*b"ab"], suffix="cd").prompts[0].token_ids == expected
    # Marks past the model's embeddings mark nothing.
    assert refusal(replace(model, vocab_size=260), prompt="ab", suffix="cd").param == "suffix"
    assert prepare(prompt="ab", suffix="").prompts[0].token_ids == tuple(b"ab")


# ---- the best of several


async def test_best_of_answers_with_the_likeliest_by_token():
    texts = ["bbbb", "ab", "cc", "aabb"]
    engine = FakeEngine(lambda _m, index: [*texts[index].encode(), EOS])
    engine.logprob_of = lambda token_id: {97: -0.1, 98: -2.0, 99: -0.5, EOS: -1.0}[token_id]
    answer = await complete(engine, prompt=["x", "yz"], n=2, best_of=4, max_tokens=8)
    # Means, the end token's included: bbbb -1.8, ab -1.03, cc -0.67, aabb -1.04.
    assert [choice["text"] for choice in answer["choices"]] == ["cc", "ab"] * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 2 * (5 + 3 + 3 + 5)  # all that were generated
    assert answer["usage"]["prompt_tokens"] == 3
    assert (engine.submitted[0].params.n, engine.submitted[0].params.logprobs) == (4, 0)


async def test_best_of_with_logprobs_echo_and_stop_strings():
    engine = FakeEngine(lambda _m, index: [*f"{index}.x".encode(), EOS])
    engine.logprob_of = lambda token_id: -1.0 / (1 + token_id % 7)  # "3" is 51: 2 of 7
    body = {"prompt": "ab", "best_of": 3, "logprobs": 1, "echo": True, "stop": ".", "return_token_ids": True}
    (choice,) = (await complete(engine, **body))["choices"]
    best = max(range(3), key=lambda index: engine.logprob_of(48 + index))
    assert choice["text"] == f"ab{best}"
    assert choice["logprobs"]["tokens"] == ["a", "b", str(best)]
    assert choice["prompt_token_ids"] == [97, 98]


# ---- what an answer tells beside its text


async def test_usage_tells_cached_and_recomputed_tokens():
    engine = FakeEngine(says("xy"))
    engine.num_cached_tokens, engine.num_recomputed_tokens = 3, 5
    usage = (await complete(engine, prompt=["abcd", "efgh"], n=2))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 6, "audio_tokens": 0}  # of each prompt once
    assert usage["recomputed_tokens"] == 20  # of each sequence
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0
    assert "recomputed_tokens" not in (await complete(FakeEngine(), prompt="ab"))["usage"]


@pytest.mark.parametrize("include_usage", [None, True])
async def test_each_chunk_counts_when_asked(include_usage):
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    chunks = await stream(FakeEngine(says("abc")), prompt="xy", n=2, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == 8
    assert (chunks[-1]["choices"] == []) == bool(include_usage)


async def test_obfuscation_makes_chunks_of_like_size():
    text = "a" * 10 + "\u00e9\U0001f600"
    body = {"prompt": "xy", "max_tokens": 30, "logprobs": 1}
    async with client_of(make_app(FakeEngine(says(text)))) as client:
        options = {"include_obfuscation": True}
        response = await client.post("/v1/completions", json={**body, "stream": True, "stream_options": options})
    events = response.text.split("\n\n")[:-2]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {len(event.removeprefix("data: ").encode()) % 64 for event in events} == {0}
    assert fold(chunks)[0]["text"] == text
    assert all(isinstance(chunk["obfuscation"], str) for chunk in chunks)
    assert all("obfuscation" not in chunk for chunk in await stream(FakeEngine(says(text)), **body))


@pytest.mark.parametrize("streamed", [False, True])
async def test_timings_on_request(streamed):
    engine = FakeEngine(says("abc"), step_seconds=0.002)
    engine.num_cached_tokens = 1
    body = {"prompt": "xyz", "timings_per_token": True}
    answers = await stream(engine, **body) if streamed else [await complete(engine, **body)]
    for answer in answers:
        timings = answer["timings"]
        assert timings["prompt_ms"] > 0
        assert timings["predicted_n"] >= 1
    assert timings["cache_n"] == 1
    assert (timings["prompt_n"], timings["predicted_n"]) == (2, 4)
    assert timings["predicted_per_second"] == pytest.approx(3e3 / timings["predicted_ms"])
    assert timings["prompt_per_second"] == pytest.approx(2e3 / timings["prompt_ms"])
    assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / 3)
    assert "timings" not in await complete(FakeEngine(), prompt="ab")


async def test_timings_without_an_answer():
    body = {"prompt": "xyz", "max_tokens": 0, "echo": True, "timings_per_token": True}
    timings = (await complete(FakeEngine(), **body))["timings"]
    assert (timings["predicted_n"], timings["predicted_ms"], timings["predicted_per_second"]) == (0, 0.0, None)


async def test_the_fingerprint_is_that_of_the_setup():
    engine = FakeEngine()
    answer = await complete(engine, prompt="ab")
    fingerprint = answer["system_fingerprint"]
    assert fingerprint.startswith("fp_")
    assert Completion.model_validate(answer).system_fingerprint == fingerprint
    assert {chunk["system_fingerprint"] for chunk in await stream(FakeEngine(), prompt="ab")} == {fingerprint}
    other = FakeEngine()
    other.info = msgspec.structs.replace(other.info, dtype="bfloat16")
    assert (await complete(other, prompt="ab"))["system_fingerprint"] != fingerprint
    renamed = (await response_of(engine, make_app(engine, model="other"), prompt="ab")).json()
    assert renamed["system_fingerprint"] != fingerprint
    half = (await response_of(engine, make_app(engine, dtype="bfloat16"), prompt="ab")).json()
    assert half["system_fingerprint"] != fingerprint  # with other weights, beside a cache of the same type
