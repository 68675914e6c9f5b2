"""Beam searches at the edge: what reaches the engine, what is refused by name, and how the answers are shown."""

import json

import pytest

from scheduler.sampling_params import BeamSearch
from server.chat_preparation import prepare_chat
from server.errors import InvalidRequest
from server.preparation import prepare_completion
from server.served_model import ServedModel, longest_token
from tests.server.doubles import EOS, FakeEngine, byte_tokenizer
from tests.server.test_completions import complete

_SERVED = ServedModel(("m",), byte_tokenizer(), longest_token(byte_tokenizer()), vocab_size=258, max_model_len=8192)
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def prepare(**body: object):
    return prepare_completion(json.dumps({"prompt": "ab", "use_beam_search": True, **body}).encode(), _SERVED)


def prepare_messages(**body: object):
    messages = [{"role": "user", "content": "a"}]
    body = {"messages": messages, "use_beam_search": True, "max_tokens": 5, **body}
    return prepare_chat(json.dumps(body).encode(), _SERVED)


def refusal(function, **body: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        function(**body)
    return error.value


@pytest.mark.parametrize(
    ("body", "n", "search"),
    [
        ({}, 1, BeamSearch(1)),
        ({"n": 3}, 3, BeamSearch(3)),
        ({"n": 2, "best_of": 5}, 2, BeamSearch(5)),
        ({"n": 2, "beam_width": 32, "length_penalty": 0.5, "early_stopping": True}, 2, BeamSearch(32, 0.5, True)),
        ({"beam_width": 4, "best_of": 4, "length_penalty": -2, "early_stopping": False}, 1, BeamSearch(4, -2.0)),
        ({"beam_width": 4, "temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "seed": 7}, 1, BeamSearch(4)),
        ({"beam_width": 4, "temperature": 0, "top_k": 258, "stream": False}, 1, BeamSearch(4)),
    ],
)
def test_a_search_reaches_the_engine(body, n, search):
    prepared = prepare(prompt=["ab", "cd"], **body)
    for prompt in prepared.prompts:
        assert (prompt.params.n, prompt.params.temperature, prompt.params.beam_search) == (n, 0.0, search)
    assert (prepared.n, prepared.num_sequences, prepared.ignored_fields) == (n, n, ())
    if "best_of" not in body:
        [prompt] = prepare_messages(**body).prompts
        assert (prompt.params.n, prompt.params.temperature, prompt.params.beam_search) == (n, 0.0, search)


@pytest.mark.parametrize("prepare_body", [prepare, prepare_messages])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream": True}, "stream"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 50}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_choice": ["a", "b"]}, "guided_choice"),
        ({"n": 3, "beam_width": 2}, "beam_width"),
        ({"n": 33}, "n"),
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 33}, "beam_width"),
        ({"length_penalty": -10.5}, "length_penalty"),
    ],
)
def test_what_a_search_cannot_go_together_with_is_refused_by_name(prepare_body, body, param):
    error = refusal(prepare_body, **body)
    assert error.param == param
    assert param in error.message


def test_best_of_is_the_width_of_a_search():
    assert refusal(prepare, best_of=2, n=3).param == "best_of"
    assert refusal(prepare, best_of=33).param == "best_of"
    error = refusal(prepare, best_of=4, beam_width=5)
    assert error.message == "best_of and beam_width mean the same in a beam search and must not differ."


def test_tools_that_must_be_called_have_a_form():
    error = refusal(prepare_messages, tools=[_TOOL], tool_choice="required")
    assert error.param == "tools"
    assert prepare_messages(tools=[_TOOL], tool_choice="none").prompts[0].params.beam_search == BeamSearch(1)


@pytest.mark.parametrize(("field", "value"), [("beam_width", 1), ("length_penalty", 0), ("early_stopping", True)])
def test_a_search_must_be_asked_for(field, value):
    error = refusal(prepare, use_beam_search=False, **{field: value})
    assert error.message == f"{field} belongs to a beam search: it needs use_beam_search to be true."
    neutral = prepare(use_beam_search=None, length_penalty=1, early_stopping=False)
    assert neutral.prompts[0].params.beam_search is None
    assert neutral.ignored_fields == ()


async def test_the_answers_come_in_the_order_of_the_engine_and_stop_strings_cut_them():
    texts = ["one. two", "three"]
    engine = FakeEngine(lambda _m, index: [*texts[index].encode(), EOS], chunks=(100,))
    body = {"use_beam_search": True, "n": 2, "best_of": 4, "max_tokens": 20, "stop": ".", "logprobs": 1}
    answer = await complete(engine, prompt=["a", "b"], **body)
    assert [choice["text"] for choice in answer["choices"]] == ["one", "three"] * 2
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 4
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [3, 5] * 2
    assert {message.params.beam_search for message in engine.submitted} == {BeamSearch(4)}
