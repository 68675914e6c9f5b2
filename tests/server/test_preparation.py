"""What a request may ask for at most, where that needs a model with a longer window than the scripted engine has.

Also what of a prompt is kept, and what ends an answer, whichever route it comes by.
"""

import json
from dataclasses import replace

import pytest

from server.chat_preparation import prepare_chat
from server.errors import InvalidRequest
from server.messages_preparation import prepare_message
from server.preparation import prepare_completion
from server.responses_preparation import prepare_response
from server.served_model import ServedModel, longest_token
from tests.server.doubles import EOS, byte_tokenizer

_SERVED = ServedModel(("m",), byte_tokenizer(), longest_token(byte_tokenizer()), vocab_size=258, max_model_len=8192)


@pytest.mark.parametrize(
    ("body", "is_taken"),
    [
        ({"prompt": [1] * 8191, "logprobs": 20, "echo": True, "max_tokens": 1, "n": 12}, True),
        ({"prompt": [1] * 8191, "logprobs": 20, "echo": True, "max_tokens": 1, "n": 13}, False),
        ({"prompt": [[1] * 8191] * 128, "logprobs": 1, "echo": True, "max_tokens": 1}, True),
        ({"prompt": [[1] * 8191] * 128, "logprobs": 2, "echo": True, "max_tokens": 1}, False),
        ({"prompt": [[1] * 8191] * 128, "logprobs": 2, "max_tokens": 1}, True),
        ({"prompt": [[1] * 8191] * 128, "echo": True, "max_tokens": 1}, True),
        ({"prompt": "a", "logprobs": 20, "max_tokens": 780, "n": 128}, True),
        ({"prompt": "a", "logprobs": 20, "max_tokens": 781, "n": 128}, False),
        ({"prompt": ["a", "b"], "logprobs": 20, "max_tokens": 391, "n": 128}, False),
    ],
)
def test_most_log_probabilities_of_one_completion(body, is_taken):
    content = json.dumps(body).encode()
    if is_taken:
        prepare_completion(content, _SERVED)
        return
    with pytest.raises(InvalidRequest, match=r"at most 2097152\. Ask for fewer logprobs") as refusal:
        prepare_completion(content, _SERVED)
    assert refusal.value.param == "logprobs"


def test_most_log_probabilities_of_one_chat():
    body = {"messages": [{"role": "user", "content": "a"}], "n": 128, "logprobs": True, "top_logprobs": 20}
    with pytest.raises(InvalidRequest, match="a smaller max_tokens") as refusal:
        prepare_chat(json.dumps({**body, "max_tokens": 781}).encode(), _SERVED)
    assert refusal.value.param == "logprobs"
    prepare_chat(json.dumps({**body, "max_tokens": 780}).encode(), _SERVED)
    # An answer that may fill the window by default is not held against the caller.
    prepare_chat(json.dumps(body).encode(), _SERVED)


@pytest.mark.parametrize(
    ("fields", "stop_token_ids"),
    [
        ({}, (EOS,)),
        ({"stop_token_ids": [97, EOS]}, (97, EOS)),
        ({"ignore_eos": True}, ()),
        ({"ignore_eos": True, "stop_token_ids": [97]}, (97,)),
    ],
)
def test_the_tokenizers_own_end_ends_an_answer(fields, stop_token_ids):
    prepared = prepare_completion(json.dumps({"prompt": "a", **fields}).encode(), _SERVED)
    assert prepared.prompts[0].params.stop_token_ids == stop_token_ids


_LONG = "x" * 9000
_TURNS = [{"role": "user", "content": _LONG}]


@pytest.mark.parametrize(
    ("prepare", "fields", "num_left"),
    [
        (prepare_completion, {"prompt": _LONG}, 16),
        (prepare_completion, {"prompt": _LONG, "max_tokens": 0}, 0),
        (prepare_completion, {"prompt": _LONG, "max_tokens": 100}, 100),
        (prepare_chat, {"messages": _TURNS}, 1024),
        (prepare_chat, {"messages": _TURNS, "max_completion_tokens": 100}, 100),
        (prepare_chat, {"messages": _TURNS, "max_tokens": 8191}, 8191),
        (prepare_message, {"messages": _TURNS, "max_tokens": 0}, 0),
        (prepare_message, {"messages": _TURNS, "max_tokens": 8}, 8),
        (prepare_message, {"messages": _TURNS, "max_tokens": 2000}, 2000),
        (prepare_message, {"messages": _TURNS, "max_tokens": 64000}, 1024),
        (prepare_response, {"input": _LONG}, 1024),
        (prepare_response, {"input": _LONG, "max_output_tokens": 100}, 100),
    ],
)
def test_a_prompt_that_is_cut_to_the_window_leaves_room_for_the_answer(prepare, fields, num_left):
    prepared = prepare(json.dumps({**fields, "truncate_prompt_tokens": -1}).encode(), _SERVED)
    (prompt,) = prepared.prompts
    assert len(prompt.token_ids) == 8192 - num_left
    assert prompt.params.max_tokens == num_left


def test_a_small_window_is_shared_too():
    body = {"messages": _TURNS, "truncate_prompt_tokens": -1}
    (prompt,) = prepare_chat(json.dumps(body).encode(), replace(_SERVED, max_model_len=20)).prompts
    assert (len(prompt.token_ids), prompt.params.max_tokens) == (15, 5)
