"""Schemas that people wrote, and JSON Schema's official tests: what is allowed satisfies the schema, or it is refused.

Formats are patterns to a grammar: a date may be the 30th of February. They are therefore not judged.
"""

import json
import re
import warnings
from collections import Counter
from random import Random

import jsonschema
import pytest

from scheduler.grammar import GrammarCompiler, GrammarError, Vocabulary
from scheduler.sampling_params import StructuredOutput
from tests import data_files
from tests.scheduler.fake_runner import allowed_tokens

PIECES = [
    '{"',
    '":',
    '": "',
    '", "',
    "],",
    "}}",
    '"}',
    "true",
    "null",
    "  ",
    "é",
    "日本",
    "00",
    "ab",
    "-1",
    "\\u00",
    ": [",
    ".5",
    '"a":',
    "\\u0061",
]
VOCABULARY = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in PIECES]
MAX_TOKENS = 400
CLOSING = {i for i, token in enumerate(VOCABULARY) if token[0] in b'"}]'}


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(Vocabulary(VOCABULARY, (), lambda text: list(text.encode())), len(VOCABULARY))


def walk(state, rng):
    """An answer at random, half of its tokens among those that close something; None if it does not end."""
    state, text = state.fork(), b""
    for _ in range(MAX_TOKENS):
        if state.may_end:
            return text.decode()
        allowed = allowed_tokens(state.bitmask())
        assert allowed, f"a dead end after {text!r}"
        closing = [i for i in allowed if i in CLOSING]
        token_id = rng.choice(closing if closing and rng.random() < 0.5 else allowed)
        assert state.accept(token_id), f"{VOCABULARY[token_id]!r} was allowed after {text!r}"
        text += VOCABULARY[token_id]
    return None


def is_valid(schema, value):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the judge's own regular expressions
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        try:
            return kind(schema).is_valid(value)
        except re.error:  # \p{...}, which Python has not: the judge cannot say
            return True


def words_of(schema):
    """Every keyword and every string of a schema."""
    if isinstance(schema, dict):
        return {word for key, value in schema.items() for word in {key, *words_of(value)}}
    if isinstance(schema, list):
        return {word for item in schema for word in words_of(item)}
    return {schema} if isinstance(schema, str) and schema else set()


def assert_names_what_is_not_supported(message, schema):
    named = ("Unsatisfiable", "allows no answer", "$dynamicAnchor", "too large", "oneOf", "regex", "pattern")
    assert any(word in message for word in (*words_of(schema), *named)), (message, schema)


@pytest.mark.parametrize("first", range(4))
def test_random_answers_satisfy_the_schemas_that_people_wrote(compiler, first):
    outcomes = Counter()
    for number, row in enumerate(data_files.benchmark_schemas()[first::8]):
        schema = row["schema"]
        try:
            state = compiler.compile(StructuredOutput("json_schema", json.dumps(schema)))
        except GrammarError as refused:
            assert_names_what_is_not_supported(str(refused), schema)
            outcomes["refused"] += 1
            continue
        text = walk(state, Random(number))
        outcomes["unfinished" if text is None else "answered"] += 1
        assert text is None or is_valid(schema, json.loads(text)), (row["id"], text)
    assert outcomes["answered"] > 30, outcomes
    assert outcomes["refused"] < 6, outcomes


def random_schema(rng, depth):
    """Of what a grammar could take for something else: names that come again or are spelled by code, far numbers."""
    inner = [random_schema(rng, depth - 1) if depth else {"type": rng.choice(["integer", "string"])} for _ in range(3)]
    near = rng.choice([2**53, -(2**53), 2**60, 2**63, -(2**63)]) + rng.randrange(-3, 4)
    integer = {"type": "integer", **{word: near for word in ("minimum", "maximum") if rng.random() < 0.5}}
    names = rng.sample(["a", "b", "ab", "\n", "é"], 2)
    mapping = {"type": "object", "minProperties": rng.randrange(4)}
    for word, value in (
        ("properties", dict(zip(names, inner, strict=False))),
        ("patternProperties", {"a": inner[2]}),
        ("additionalProperties", rng.choice([False, {"type": "null"}])),
        ("required", names[: rng.randrange(3)]),
    ):
        if rng.random() < 0.6:
            mapping[word] = value
    plain = [integer, {"enum": [near, {"a": near + 1}]}, {"const": rng.choice([near, "\x02", "a\n"])}]
    return rng.choice([mapping, mapping, {"anyOf": inner[:2]}, *plain] if depth else plain)


def test_random_answers_satisfy_schemas_that_a_grammar_could_take_for_others(compiler):
    outcomes = Counter()
    for seed in range(250):
        schema = random_schema(Random(seed), 2)
        try:
            state = compiler.compile(StructuredOutput("json_schema", json.dumps(schema)))
        except GrammarError as refused:
            assert_names_what_is_not_supported(str(refused), schema)
            outcomes["refused"] += 1
            continue
        for number in range(4):
            text = walk(state, Random(number))
            outcomes["unfinished" if text is None else "answered"] += 1
            assert text is None or is_valid(schema, json.loads(text)), (schema, text)
    assert outcomes["answered"] > 200, outcomes


def test_official_verdicts_are_kept(compiler):
    """Nothing invalid is allowed. Of what is valid, properties in another order than the schema's are left out."""
    outcomes = Counter()
    for row in data_files.schema_tests():
        if row["file"].startswith("optional/format"):
            continue
        try:
            state = compiler.compile(StructuredOutput("json_schema", json.dumps(row["schema"])))
        except GrammarError as refused:
            assert_names_what_is_not_supported(str(refused), row["schema"])
            outcomes["schema refused"] += 1
            continue
        text = walk(state, Random(0))
        if text is not None:
            assert is_valid(row["schema"], json.loads(text)), (row["description"], text)
        for test in row["tests"]:
            answer = state.fork()
            spelled = json.dumps(test["data"], ensure_ascii=False).encode()
            allowed = all(answer.accept(byte) for byte in spelled) and answer.may_end
            assert test["valid"] or not allowed, (row["description"], test)
            outcomes["valid allowed" if allowed else "valid left out" if test["valid"] else "invalid kept out"] += 1
    assert outcomes["valid allowed"] > 10 * outcomes["valid left out"], outcomes
    assert outcomes["invalid kept out"] > 200, outcomes
    assert outcomes["schema refused"] < 180, outcomes
