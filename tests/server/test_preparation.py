"""What a request may ask for at most, where that needs a model with a longer window than the scripted engine has."""

import json

import pytest

from server.chat_preparation import prepare_chat
from server.errors import InvalidRequest
from server.preparation import prepare_completion
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
