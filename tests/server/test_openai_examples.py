"""The examples of OpenAI's API description over the stand-in engine; `make clients` sends them to the real one."""

import pytest
from msgspec.structs import replace

from tests.clients.openai_examples import Example, check_answer, missing_keys, read_examples
from tests.server.doubles import FakeEngine, client_of, make_app, says

EXAMPLES = read_examples("byte-model")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.path}, {example.title}")
async def test_every_example_is_answered_or_refused_by_name(example: Example):
    engine = FakeEngine(says("Hello! How can I help?"))
    engine.info = replace(engine.info, max_model_len=2048)
    async with client_of(make_app(engine)) as client:
        response = await client.request(example.method, example.url, json=example.body)
    check_answer(example, response)
    assert engine.open_requests == []


def test_missing_keys_are_found():
    theirs = {"a": {"b": 1}, "c": [{"type": "x", "d": 1}], "e": [{"type": "y", "f": 1}], "g": None}
    assert sorted(missing_keys({"a": {}, "c": [{"type": "x"}], "e": [{"type": "z"}]}, theirs)) == [
        ".a.b",
        ".c[0].d",
        ".g",
    ]
