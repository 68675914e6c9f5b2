"""One name twice in an object: refused, wherever it stands."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import InvalidRequest
from server.json_body import refuse_repeated_names
from tests.server.doubles import FakeEngine, client_of, make_app

_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=30,
)


@given(_JSON)
def test_what_a_writer_writes_passes(value):
    refuse_repeated_names(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"a": 1, "a": 1}', "a"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "b"),
        (b'[[{"a": 1}], [{"x": 1, "a": 1, "x": 2}]]', "x"),
        (b'{"a": 1, "\\u0061": 2}', "a"),
        (b'{"": 1, "": 2}', ""),
    ],
)
def test_a_name_that_comes_twice(body, name):
    with pytest.raises(InvalidRequest) as error:
        refuse_repeated_names(body)
    assert error.value.param == name


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "stream_options": {"x": 1, "x": 2}}',
        b'{"prompt": "a", "unknown": {"x": 1, "x": 2}}',
    ],
)
async def test_a_route_refuses_it(body):
    engine = FakeEngine()
    async with client_of(make_app(engine)) as client:
        response = await client.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("prompt", "x")
    assert engine.submitted == []


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"]
)
@pytest.mark.parametrize("depth", [150, 195, 210, 50_000])
async def test_depth_is_bounded_and_never_a_fault_of_ours(path, depth):
    deep = "[" * (depth - 3) + "]" * (depth - 3)
    async with client_of(make_app(FakeEngine())) as client:
        for field in (
            "unknown",
            "metadata",
            "tools",
            "documents",
            "chat_template_kwargs",
            "response_format",
            "prompt",
            "input",
        ):
            body = f'{{"messages": [{{"role": "user", "content": "a"}}], "max_tokens": 1, "{field}": [{deep}]}}'
            response = await client.post(path, content=body)
            assert response.status_code in (200, 400), (field, response.text)
            if depth > 200:
                assert "recursion limit" in response.text
