"""Objects of data that go to another process and come back: equal, of the same types, and nothing else."""

import dataclasses
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.sampling_params import SamplingParams, StructuredOutput
from server.errors import InvalidRequest
from server.preparation import PreparedRequest, prepare_completion
from server.protocol.completions import CompletionRequest
from server.served_model import ServedModel, longest_token
from server.token_ids import TokenIds
from server.value_codec import UnknownType, ValueCodec
from tests.server.doubles import byte_tokenizer

_SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())
_VALUES = st.recursive(
    st.one_of(_SCALARS, st.lists(st.integers(-(2**31), 2**31 - 1)).map(TokenIds)),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner),
        st.frozensets(_SCALARS),
        st.sets(_SCALARS),
    ),
    max_leaves=20,
)


def there_and_back(value: object) -> object:
    return ValueCodec().decode(ValueCodec().encode(value))


def shape(value: object) -> object:
    """Types at every depth: True equals 1, and a list of nothing equals none other."""
    if isinstance(value, dict):
        return type(value), [(shape(k), shape(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shape(v) for v in value]
    return type(value)


@given(_VALUES)
def test_values_come_back(value):
    back = there_and_back(value)
    assert back == value
    assert shape(back) == shape(value)


@pytest.mark.parametrize(
    "value", [["object", "os", "system"], ["known", "x"], ["int", "5"], [[]], ("list",), {"tuple": []}]
)
def test_values_that_look_like_the_codec_s_own(value):
    assert there_and_back(value) == value


def test_numbers_that_are_none():
    assert math.isnan(there_and_back(math.nan))
    assert there_and_back([math.inf, 2**64, -(2**63) - 1, 0]) == [math.inf, 2**64, -(2**63) - 1, 0]


def test_objects_of_ours_come_back():
    params = SamplingParams(5, stop_token_ids=(1, 2), structured_output=StructuredOutput("regex", "a+"))
    assert there_and_back(params) == params
    request = CompletionRequest.model_validate_json(
        b'{"prompt": ["a", "b"], "stop": "x", "unknown": 1180591620717411303424, "logit_bias": {"5": 1.5}}'
    )
    back = there_and_back(request)
    assert back == request
    assert back.ignored_fields() == ["unknown"]
    assert back.model_fields_set == request.model_fields_set


def test_what_a_request_becomes_comes_back():
    tokenizer = byte_tokenizer()
    model = ServedModel(("m",), tokenizer, longest_token(tokenizer), 258, 256)
    body = b'{"prompt": ["ab", "c"], "echo": true, "n": 2, "stop": ["x"], "structured_outputs": {"choice": ["a"]}}'
    prepared = prepare_completion(body, model)
    back = there_and_back(prepared)
    assert isinstance(back, PreparedRequest)
    assert back == prepared
    assert all(type(prompt.token_ids) is TokenIds for prompt in back.prompts)


def test_what_both_ends_have_is_not_sent():
    ours, theirs = byte_tokenizer(), byte_tokenizer()
    model = ServedModel(("m",), ours, 1, 258, 256)
    sent = ValueCodec({"tokenizer": ours}).encode(model)
    assert len(sent) < 200
    assert ValueCodec({"tokenizer": theirs}).decode(sent) == dataclasses.replace(model, tokenizer=theirs)


@pytest.mark.parametrize("value", [object(), byte_tokenizer(), InvalidRequest("x"), print, SamplingParams, {"a": [1j]}])
def test_what_is_no_data_stays(value):
    with pytest.raises(UnknownType):
        ValueCodec().encode(value)


@pytest.mark.parametrize(
    "tree",
    [
        ["object", "os", "system", "true"],
        ["object", "subprocess", "Popen", "true"],
        ["object", "fastapi.dependencies.models", "Dependant"],
        ["object", "server.serve", "serve"],
        ["object", "server.engine_client", "EngineClient"],
        ["object", "server.errors", "InvalidRequest", "x"],
        [],
    ],
)
def test_nothing_else_is_made(tree):
    with pytest.raises(UnknownType):
        ValueCodec().decode(msgspec.msgpack.encode(tree))


@given(st.lists(st.integers(0, 2**31 - 1)), st.integers(-5, 5), st.integers(-5, 5))
def test_token_ids_are_like_a_tuple(ids, start, stop):
    token_ids = TokenIds(ids)
    assert token_ids == tuple(ids) == token_ids
    assert token_ids == ids
    assert list(token_ids[start:stop]) == ids[start:stop]
    assert (len(token_ids), list(token_ids), hash(token_ids)) == (len(ids), ids, hash(tuple(ids)))
    assert TokenIds.unpack(token_ids.packed()) == token_ids
    assert token_ids != [*ids, 1]
    assert len(token_ids.packed()) == 4 * len(ids)
