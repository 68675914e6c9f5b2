"""`/v1/completions` against a scripted engine: shapes, counts, logprobs, echo, and streams that equal whole answers."""

import json
import threading

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion

from scheduler.sampling_params import SamplingParams
from server import choices as choices_module
from server.config import Settings
from server.generation import Generation
from server.metrics import ServerMetrics
from server.preparation import PreparedPrompt, PreparedRequest
from server.request_history import RequestTrace
from server.routes import generating
from server.scored_tokens import ScoredToken
from server.service_terms import Submitter
from server.token_ids import TokenIds
from tests.data_files import emoji, grapheme_tests, mgsm_prompts, naughty_strings
from tests.server.doubles import EOS, FakeEngine, byte_tokenizer, client_of, make_app, says
from tests.server.text_oracle import decoded_so_far, whole_text


async def complete(engine: FakeEngine, **body: object) -> dict:
    async with client_of(make_app(engine)) as client:
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    if not body.get("echo"):  # OpenAI's types know no null for a prompt's first token; its server sends one
        Completion.model_validate(response.json(), strict=True)
    return response.json()


async def stream(engine: FakeEngine, path: str = "/v1/completions", **body: object) -> list[dict]:
    async with client_of(make_app(engine)) as client:
        response = await client.post(path, json={"stream": True, **body})
    assert response.status_code == 200, response.text
    return events_of(response)


def events_of(response: httpx.Response) -> list[dict]:
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_answer_has_openai_shape_and_counts():
    engine = FakeEngine()
    answer = await complete(engine, prompt="abc", max_tokens=10, user="someone")
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "byte-model"
    assert answer["choices"] == [
        {"index": 0, "text": "cba", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    # The token that ended the answer was generated, though it shows no text.
    assert counted(answer["usage"]) == (3, 4, 7)
    assert engine.open_requests == []
    assert engine.aborted == []


def counted(usage: dict) -> tuple[int, int, int]:
    """Prompt, answer, and both."""
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


async def test_return_token_ids_gives_the_ids_of_prompt_and_answer():
    body = {"prompt": ["ab", "cd"], "n": 2, "return_token_ids": True}
    choices = (await complete(FakeEngine(says("xy")), **body))["choices"]
    assert [choice["token_ids"] for choice in choices] == [[*b"xy", EOS]] * 4
    assert [choice["prompt_token_ids"] for choice in choices] == [[*b"ab"]] * 2 + [[*b"cd"]] * 2
    chunks = [chunk["choices"][0] for chunk in await stream(FakeEngine(says("xy")), **body)]
    for index in range(4):
        ours = [chunk for chunk in chunks if chunk["index"] == index]
        assert [token_id for chunk in ours for token_id in chunk["token_ids"]] == [*b"xy", EOS]
        assert ["prompt_token_ids" in chunk for chunk in ours] == [True] + [False] * (len(ours) - 1)


async def test_max_tokens_defaults_to_sixteen():
    answer = await complete(FakeEngine(says("x" * 50)), prompt="abc")
    assert answer["choices"][0]["text"] == "x" * 16
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_an_answer_without_tokens():
    answer = await complete(FakeEngine(lambda _message, _index: []), prompt="abc")
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "length")


async def test_default_max_tokens_shrinks_to_the_room_left():
    answer = await complete(FakeEngine(says("x" * 50)), prompt="a" * 250)
    assert answer["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ba", "ab"]),
        (["ab", "cd"], ["ba", "ab", "dc", "cd"]),
        ([97, 98], ["ba", "ab"]),
        ([[97, 98], [99, 100]], ["ba", "ab", "dc", "cd"]),
        (["ab", [99, 100]], ["ba", "ab", "dc", "cd"]),
    ],
)
async def test_choices_stand_by_prompt_then_by_n(prompt, texts):
    engine = FakeEngine(
        lambda message, index: (lambda t: [*t[index:], *t[:index], EOS])(message.prompt_token_ids[::-1])
    )
    answer = await complete(engine, prompt=prompt, n=2)
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    assert answer["usage"]["prompt_tokens"] == len(texts)  # two tokens a prompt, each prompt counted once


async def test_parameters_reach_the_engine():
    engine = FakeEngine()
    await complete(
        engine,
        prompt="ab",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=-2,
        n=2,
        stop_token_ids=[5, 6],
        ignore_eos=True,
        logprobs=3,
    )
    params = engine.submitted[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.9, 40)
    assert (params.min_p, params.seed, params.n) == (0.05, 2**63 - 2, 2)
    assert (params.stop_token_ids, params.ignore_eos, params.logprobs) == ((5, 6), True, 3)
    assert params.prompt_logprobs is None


async def test_null_means_absent():
    engine = FakeEngine()
    names = "model max_tokens temperature top_p top_k min_p seed n stop stop_token_ids ignore_eos stream stream_options"
    more = "logprobs echo best_of suffix logit_bias presence_penalty user"
    await complete(engine, prompt="ab", **dict.fromkeys(f"{names} {more}".split()))
    params = engine.submitted[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.n) == (16, 1.0, 1.0, 0, 1)


@pytest.mark.parametrize("fields", [{}, {"seed": -1}])
async def test_each_request_without_a_seed_draws_its_own(fields):
    engine = FakeEngine()
    for _ in range(2):
        await complete(engine, prompt=["ab", "ab"], **fields)
    assert len({message.params.seed for message in engine.submitted}) == 4


async def test_ignored_fields_are_named_in_a_header():
    async with client_of(make_app(FakeEngine())) as client:
        body = {"prompt": "ab", "foo": 1, "b\u00e4r\r\n": 2, "user": "x", "stream_options": {"x": 1}, "stream": True}
        response = await client.post("/v1/completions", json=body)
    assert response.headers["x-octavo-ignored-fields"] == "foo,b%C3%A4r%0D%0A,stream_options.x"


async def test_logprobs_arrays_are_aligned_with_the_text():
    answer = await complete(FakeEngine(says("h\u00e9\U0001f600!")), prompt="ab", logprobs=2)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [
        "h",
        "bytes:\\xc3",
        "bytes:\\xa9",
        "bytes:\\xf0",
        "bytes:\\x9f",
        "bytes:\\x98",
        "bytes:\\x80",
        "!",
    ]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3]
    assert choice["text"] == "h\u00e9\U0001f600!"
    assert logprobs["token_logprobs"] == [-0.5] * 8
    assert logprobs["top_logprobs"][0] == {"h": -0.5, "i": -1.5}


async def test_logprobs_always_hold_the_token_that_came():
    answer = await complete(FakeEngine(says("h")), prompt="ab", logprobs=0)
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"h": -0.5}]


async def test_echo_with_logprobs_and_no_new_tokens_scores_the_prompt():
    answer = await complete(FakeEngine(), prompt="A B C", echo=True, logprobs=1, max_tokens=0)
    choice = answer["choices"][0]
    assert choice["text"] == "A B C"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] == {
        "tokens": ["A", " ", "B", " ", "C"],
        "token_logprobs": [None, -0.5, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {" ": -0.5}, {"B": -0.5}, {" ": -0.5}, {"C": -0.5}],
        "text_offset": [0, 1, 2, 3, 4],
        "bytes": [[65], [32], [66], [32], [67]],
    }
    assert counted(answer["usage"]) == (5, 0, 5)


@pytest.mark.parametrize("streamed", [False, True])
async def test_echo_stands_before_every_choice(streamed):
    body = {"prompt": ["h\u00e9", [0xE9, 98]], "n": 2, "echo": True, "logprobs": 0, "max_tokens": 2}
    if streamed:
        choices = fold(await stream(FakeEngine(says("xyz")), **body))
    else:
        choices = (await complete(FakeEngine(says("xyz")), **body))["choices"]
    assert [choice["text"] for choice in choices] == ["h\u00e9xy"] * 2 + ["\ufffdbxy"] * 2
    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[0, 1, 1, 2, 3]] * 2 + [[0, 0, 2, 3]] * 2
    assert [choice["logprobs"]["token_logprobs"][:2] for choice in choices] == [[None, -0.5]] * 4


@pytest.mark.parametrize(("length", "is_large"), [(5, False), (200, True)])
@pytest.mark.parametrize("streamed", [False, True])
async def test_echoed_prompt_is_scored_once_and_off_the_loop_if_large(monkeypatch, streamed, length, is_large):
    scoring, writing = (
        _watch(monkeypatch, choices_module, "score_prompt"),
        _watch(monkeypatch, generating, "to_json"),
    )
    body = {"prompt": ["a" * length, "b" * length], "n": 3, "echo": True, "logprobs": 20, "max_tokens": 2}
    if streamed:
        choices = fold(await stream(FakeEngine(says("xyz")), **body))
    else:
        choices = (await complete(FakeEngine(says("xyz")), **body))["choices"]
    assert [choice["text"] for choice in choices] == ["a" * length + "xy"] * 3 + ["b" * length + "xy"] * 3
    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[*range(length + 2)]] * 6
    assert len(scoring) == 2
    assert {thread is threading.main_thread() for thread in scoring} == {not is_large}
    assert (set(writing) != {threading.main_thread()}) == is_large


def _watch(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[threading.Thread]:
    """The threads in which a function of a module is called."""
    threads: list[threading.Thread] = []
    function = getattr(module, name)

    def watched(*args: object) -> object:
        threads.append(threading.current_thread())
        return function(*args)

    monkeypatch.setattr(module, name, watched)
    return threads


@pytest.mark.parametrize("length", [3, 200])
async def test_stream_of_an_echo_equals_the_whole_answer(length):
    body = {"prompt": ["\u00e9" * (length // 2), "ab"], "n": 2, "echo": True, "logprobs": 20, "max_tokens": 3}
    whole = (await complete(FakeEngine(), **body))["choices"]
    streamed = fold(await stream(FakeEngine(), **body))
    assert streamed == [{name: choice[name] for name in ("text", "logprobs", "finish_reason")} for choice in whole]


def fold(chunks: list[dict]) -> list[dict]:
    """Put a stream's chunks together, as a client would."""
    choices: dict[int, dict] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": None, "finish_reason": None})
            assert choice["finish_reason"] is None, "a chunk after the last"
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"]
            if part["logprobs"] is not None:
                arrays = choice["logprobs"] = choice["logprobs"] or {name: [] for name in part["logprobs"]}
                for name, values in part["logprobs"].items():
                    arrays[name] += values
    return [choices[index] for index in sorted(choices)]


@settings(max_examples=40, deadline=None)
@given(
    text=st.sampled_from([*naughty_strings(), *emoji()[::20], *("".join(clusters) for clusters in grapheme_tests())]),
    stop=st.lists(st.text(min_size=1, max_size=2), max_size=3),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "include_stop_str_in_output": st.booleans(),
            "skip_special_tokens": st.booleans(),
            "min_tokens": st.integers(0, 8),
            "echo": st.booleans(),
            "logprobs": st.integers(0, 2),
            "n": st.integers(1, 3),
            "stop_token_ids": st.lists(st.integers(0, 257), max_size=2),
        },
    ),
    chunks=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
async def test_stream_over_http_equals_the_whole_answer(text, stop, fields, chunks):
    stop = [*stop, *([text[1:3]] if len(text) > 2 else [])]
    body = {"prompt": ["\u00e9<|im_end|>", [97, 256]], "stop": stop, "max_tokens": 200, **fields}
    engine = FakeEngine(lambda _m, index: [*text.encode()[index:], 256, *b"x.", EOS], chunks=chunks)
    async with client_of(make_app(engine)) as client:
        whole = await client.post("/v1/completions", json=body)
        streamed = await client.post("/v1/completions", json={**body, "stream": True})
    choices = [
        {name: choice[name] for name in ("text", "logprobs", "finish_reason")} for choice in whole.json()["choices"]
    ]
    assert fold(events_of(streamed)) == choices
    assert engine.open_requests == []


async def test_stream_ends_with_usage_when_asked():
    chunks = await stream(FakeEngine(), prompt="abc", stream_options={"include_usage": True})
    *pieces, last = chunks
    assert all(chunk["usage"] is None for chunk in pieces)
    assert last["choices"] == []
    assert counted(last["usage"]) == (3, 4, 7)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


async def test_stream_has_no_usage_unless_asked():
    chunks = await stream(FakeEngine(), prompt="abc")
    assert all("usage" not in chunk for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]


async def test_stop_string_over_tokens_is_never_sent_and_ends_the_sequence():
    engine = FakeEngine(says(" ABC DEFGHIJ and so on", ends=False))
    chunks = await stream(engine, prompt="x", stop=["DEFGHIJ"], max_tokens=100, logprobs=0)
    choice = fold(chunks)[0]
    assert choice["text"] == " ABC "
    assert choice["finish_reason"] == "stop"
    assert "".join(choice["logprobs"]["tokens"]) == " ABC "
    assert engine.aborted == [(engine.submitted[0].request_id, 0)]
    assert engine.open_requests == []


async def test_stop_string_counts_no_token_after_it():
    engine = FakeEngine(says("ab<stop>cdefgh", ends=False), chunks=(5,))
    answer = await complete(engine, prompt="x", stop="<stop>", max_tokens=100)
    assert answer["choices"][0]["text"] == "ab"
    assert answer["usage"]["completion_tokens"] == 8


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


_TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from([*naughty_strings()[:200], *emoji()[::40], *(t for ts in mgsm_prompts().values() for t in ts[:1])]),
    st.sampled_from(["".join(clusters) for clusters in grapheme_tests()]),
)


@st.composite
def _answers(draw: st.DrawFn) -> tuple[list[int], PreparedRequest]:
    """What an engine says, any bytes and special tokens, and a request that cuts it anywhere."""
    text = draw(_TEXTS)
    spoken = [*text.encode(), *draw(st.binary(max_size=6))]
    for place in draw(st.lists(st.integers(0, len(spoken)), max_size=2)):
        spoken.insert(place, 256)
    pieces = st.builds(lambda i, j: text[i : i + j], st.integers(0, max(0, len(text) - 1)), st.integers(1, 4))
    stops = draw(st.lists(st.one_of(pieces, st.text(min_size=1, max_size=4)).filter(bool), max_size=4))
    params = SamplingParams(
        max_tokens=draw(st.integers(0, len(spoken) + 2)),
        logprobs=1,
        stop_token_ids=tuple(draw(st.lists(st.sampled_from(spoken or [1]), max_size=1))),
        min_tokens=draw(st.sampled_from([0, 0, 1, 3, 20])),
    )
    request = PreparedRequest(
        model="m",
        prompts=(PreparedPrompt(TokenIds((1, 2)), None, params),),
        n=1,
        stop=tuple(stops),
        logprobs=1,
        stream=False,
        include_usage=False,
        return_token_ids=True,
        ignored_fields=(),
        include_stop=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        stop_token_ids=params.stop_token_ids,
    )
    return spoken, request


@settings(max_examples=200, deadline=None)
@given(answer=_answers(), chunks=st.lists(st.integers(1, 7), min_size=1), bursts=st.booleans())
async def test_stream_equals_whole_answer(tokenizer, answer, chunks, bursts):
    """Any text, any stop strings, cut into any updates: deltas never take anything back."""
    spoken, request = answer
    engine = FakeEngine(lambda _m, _i: [*spoken, EOS], chunks=chunks, bursts=bursts)

    def generation() -> Generation:
        request_id, metrics = f"r{len(engine.submitted)}", ServerMetrics(engine, Settings(model="m"))
        trace = RequestTrace(request_id, "", None, "byte-model", "", len(request.prompts))
        return Generation(request, trace, engine, tokenizer, metrics, 0.0, Submitter())

    deltas = [delta async for delta in generation().deltas()]
    (whole,) = await generation().result()
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.tokens] == whole.tokens
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    last = deltas[-1]
    assert (last.finish_reason, last.stop_string, last.stop_token_id) == (
        whole.finish_reason,
        whole.stop_string,
        whole.stop_token_id,
    )
    assert [token_id for delta in deltas for token_id in delta.token_ids] == whole.token_ids
    assert engine.open_requests == []

    ids, ender = _generated(spoken, request)
    assert whole.token_ids == ids[: len(whole.token_ids)]
    shown = ids[:-1] if ender is not None and not request.include_stop else ids
    hidden = tokenizer.special_token_ids if request.skip_special_tokens else ()
    parts = [b"" if i in hidden else tokenizer.token_bytes(i) for i in shown]
    min_tokens = request.prompts[0].params.min_tokens
    num_spared = len(decoded_so_far(b"".join(parts[:min_tokens])))
    if len(parts) < min_tokens:
        num_spared = len(b"".join(parts).decode("utf-8", "replace"))
    expected = whole_text(b"".join(parts), request.stop, request.include_stop, num_spared)
    assert (whole.text, whole.stop_string) == expected
    if whole.stop_string is not None:
        assert (whole.finish_reason, whole.stop_token_id) == ("stop", None)
    else:
        assert whole.token_ids == ids
        assert whole.finish_reason == ("length" if ender is None else "stop")
        assert whole.stop_token_id == (ender if ender in request.stop_token_ids else None)
    if request.skip_special_tokens:
        _check_tokens(whole.text, [token for token in whole.tokens if token.token_id not in hidden])


def _generated(spoken: list[int], request: PreparedRequest) -> tuple[list[int], int | None]:
    """The tokens that the engine generates, and the one that ends them, if one does."""
    params = request.prompts[0].params
    ids = [*spoken, EOS][: params.max_tokens]
    for place, token_id in enumerate(ids):
        if token_id == EOS or token_id in params.stop_token_ids:
            return ids[: place + 1], token_id
    return ids, None


def _check_tokens(text: str, tokens: list[ScoredToken]) -> None:
    offsets = [token.offset for token in tokens]
    assert offsets == sorted(offsets)
    assert all(offset < len(text) for offset in offsets)
    raw = b"".join(token.raw for token in tokens)
    assert raw.decode("utf-8", "replace").startswith(text)
