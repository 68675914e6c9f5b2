"""OpenAI's own Python client against the real server on the real model."""

import openai
import pytest


@pytest.fixture
def client(smollm2):
    with openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none", max_retries=0) as client:
        yield client


QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def test_a_plain_and_a_streamed_completion_are_the_same(client):
    request = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}
    plain = client.completions.create(**request)
    assert plain.choices[0].text.startswith(" Paris")
    assert plain.usage.completion_tokens == 24
    assert plain.usage.prompt_tokens == 5
    chunks = list(client.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == plain.choices[0].text
    assert chunks[-1].usage == plain.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_a_plain_and_a_streamed_chat_are_the_same(client):
    request = {"model": "smollm2", "messages": QUESTION, "max_tokens": 40, "temperature": 0}
    plain = client.chat.completions.create(**request)
    assert "Paris" in plain.choices[0].message.content
    assert plain.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == plain.choices[0].message.content
    cached = plain.usage.prompt_tokens // 16 * 16  # whole blocks, which the plain one has left
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == cached
    plain.usage.prompt_tokens_details.cached_tokens = cached
    assert chunks[-1].usage == plain.usage


def test_seeded_sampling_is_repeatable_and_n_answers_differ(client):
    request = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 16, "temperature": 1.0, "n": 3}
    first = [choice.text for choice in client.completions.create(**request, seed=11).choices]
    again = [choice.text for choice in client.completions.create(**request, seed=11).choices]
    other = [choice.text for choice in client.completions.create(**request, seed=12).choices]
    assert first == again
    assert first != other
    assert len(set(first)) == 3


def test_a_stop_string_ends_the_answer_before_it(client):
    request = {"model": "smollm2", "prompt": "One, two, three, four,", "max_tokens": 30, "temperature": 0}
    whole = client.completions.create(**request).choices[0].text
    stop = whole[9:13]
    stopped = client.completions.create(**request, stop=[stop, "never this"]).choices[0]
    assert stopped.text == whole[: whole.index(stop)]
    assert stopped.finish_reason == "stop"


def test_echo_with_logprobs_scores_the_prompt(client):
    answer = client.completions.create(
        model="smollm2", prompt="The capital of France is Paris", max_tokens=0, echo=True, logprobs=1
    ).choices[0]
    assert answer.text == "The capital of France is Paris"
    assert answer.logprobs.tokens == ["The", " capital", " of", " France", " is", " Paris"]
    assert answer.logprobs.token_logprobs[0] is None
    assert all(logprob < 0 for logprob in answer.logprobs.token_logprobs[1:])
    # The model is sure of Paris: the best token there, as the plain completion shows.
    assert answer.logprobs.top_logprobs[-1] == {" Paris": answer.logprobs.token_logprobs[-1]}


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["smollm2"]


@pytest.mark.parametrize(
    ("change", "param"),
    [({"temperature": -1}, "temperature"), ({"prompt": ""}, "prompt"), ({"max_tokens": 10**6}, "max_tokens")],
)
def test_bad_requests_are_answered_and_lose_nothing(client, change, param):
    request = {"model": "smollm2", "prompt": "a", "max_tokens": 2, **change}
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(**request)
    assert error.value.body["param"] == param
    assert client.completions.create(model="smollm2", prompt="a", max_tokens=2).usage.completion_tokens >= 1
