"""Structured output on the real model, over HTTP: valid whatever the sampling, and refused by the field at fault."""

import asyncio
import json

import httpx
import jsonschema
import pytest

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": "Describe a person."}]


def post(server, path, **body):
    return httpx.post(server.url + path, json={"model": "smollm2", "max_tokens": 120, **body}, timeout=120)


def texts(answer):
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    return [(choice.get("text") or choice["message"]["content"], choice["finish_reason"]) for choice in choices]


async def test_answers_satisfy_their_schema_in_any_company(smollm2):
    sampling = [{"temperature": 0}, {"temperature": 1.5, "seed": 1, "n": 3}, {"seed": 2, "frequency_penalty": 1.0}]
    sampling += [{"seed": 3, "logprobs": True, "top_logprobs": 2}]
    async with httpx.AsyncClient(base_url=smollm2.url, timeout=120) as client:
        plain = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 120}
        answers = await asyncio.gather(
            client.post("/v1/chat/completions", json={**plain, "max_tokens": 20}),
            *(client.post("/v1/chat/completions", json={**plain, **kw, "response_format": FORMAT}) for kw in sampling),
        )
    for answer in answers[1:]:
        for text, reason in texts(answer):
            assert reason == "stop", text
            jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "possible"),
    [
        ({"guided_choice": ["yes", "yes please", "no"]}, ["yes", "yes please", "no"]),
        (
            {"structured_outputs": {"regex": "(red|green)-[0-9]"}},
            [f"{c}-{i}" for c in ("red", "green") for i in range(10)],
        ),
        ({"grammar": 'root ::= "(" root? ")"', "max_tokens": 400}, ["(" * n + ")" * n for n in range(1, 201)]),
    ],
)
def test_completions_follow_every_kind_and_stream_the_same(smollm2, fields, possible):
    body = {"prompt": "Q: Which one?\nA: ", "seed": 5, **fields}
    [(text, reason)] = texts(post(smollm2, "/v1/completions", **body))
    assert reason == "stop"
    assert text in possible
    streamed = post(smollm2, "/v1/completions", **body, stream=True)
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == text


def test_a_stop_string_cuts_a_structured_answer(smollm2):
    [(text, reason)] = texts(post(smollm2, "/v1/completions", prompt="A: ", guided_regex="abc{3}d", stop="cc"))
    assert (text, reason) == ("ab", "stop")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
         "response_format.json_schema.schema", "not supported: not"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"structured_outputs": {"grammar": "start: foo"}}, "structured_outputs.grammar", "foo"),
        ({"guided_regex": "(.{1,200}a){1,20}", "seed": 3}, "guided_regex", "cannot be followed any further"),
        ({"guided_choice": ["no"], "allowed_token_ids": [5]}, "guided_choice", "guided_choice and allowed_token_ids"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_its_field(smollm2, fields, param, words):
    answer = post(smollm2, "/v1/completions", prompt="A: ", **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]
    assert texts(post(smollm2, "/v1/completions", prompt="A: ", guided_choice=["yes"])) == [("yes", "stop")]
