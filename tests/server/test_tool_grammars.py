"""The grammars of tool calls: what they admit is read back as calls that satisfy their schemas, and nothing else is."""

import json
import random
from collections.abc import Mapping

import jsonschema
import pytest

from scheduler.grammar import GrammarCompiler, GrammarState, Vocabulary
from scheduler.sampling_params import StructuredOutput
from server.tool_parsers.formats import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_NAME_FIRST,
    CallableFunction,
    CallRules,
    ToolCallForm,
)
from tests import data_files
from tests.server.test_tool_parsers import read, write

MARKS = ("[TOOL_CALLS]", "[ARGS]")
SPECIAL_IDS = {mark: 256 + place for place, mark in enumerate(MARKS)}
TOKENS = [*(bytes([byte]) for byte in range(256)), *(mark.encode() for mark in MARKS)]
COMPILER = GrammarCompiler(Vocabulary(TOKENS, frozenset(SPECIAL_IDS.values()), lambda _: []), len(TOKENS))
FUNCTIONS = (
    CallableFunction(
        "f",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 5},
                "days": {"type": "integer", "format": "int32", "minimum": 1, "maximum": 14},
                "units": {"enum": ["c", "f", "</tool_call>"]},
                "at": {"type": "array", "items": {"$ref": "#/$defs/hour"}, "maxItems": 3},
            },
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
        },
    ),
    CallableFunction("g", None),
    CallableFunction("h.any", {}),
)
SCHEMAS = {function.name: function.parameters or {"type": "object"} for function in FUNCTIONS}
CONTENT = (
    '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false}'
)
FORMS = [
    pytest.param(HERMES, {}, id="hermes"),
    pytest.param(LLAMA3_JSON, {}, id="llama3_json"),
    pytest.param(MISTRAL, {}, id="mistral"),
    pytest.param(MISTRAL, SPECIAL_IDS, id="mistral with special tokens"),
    pytest.param(MISTRAL_NAME_FIRST, {}, id="mistral, name first"),
    pytest.param(MISTRAL_NAME_FIRST, SPECIAL_IDS, id="mistral, name first, with special tokens"),
]


def compiled(form: ToolCallForm, rules: CallRules, special_ids: Mapping[str, int]) -> GrammarState:
    return COMPILER.compile(StructuredOutput("grammar", form.grammar(rules, special_ids)))


def token_ids(text: str, special_ids: Mapping[str, int]) -> list[int]:
    raw = text.encode()
    for mark, token_id in special_ids.items():
        raw = raw.replace(mark.encode(), bytes([0xFE + token_id - 256]))  # bytes that UTF-8 does not have
    return [256 + byte - 0xFE if byte >= 0xFE else byte for byte in raw]


def admits(state: GrammarState, text: str, special_ids: Mapping[str, int]) -> bool:
    state = state.fork()
    return all(state.accept(token_id) for token_id in token_ids(text, special_ids)) and state.may_end


@pytest.mark.parametrize(("form", "special_ids"), FORMS)
def test_real_calls_are_admitted_and_others_are_not(form, special_ids):
    for row in data_files.function_calls()[::3]:
        functions = [CallableFunction(t["function"]["name"], t["function"]["parameters"]) for t in row["tools"]]
        calls = [
            (name, json.dumps(_in_order(arguments, functions, name), ensure_ascii=False))
            for name, arguments in row["calls"]
            if _is_valid(arguments, functions, name)
        ]
        calls = calls[:1] if form is LLAMA3_JSON else calls
        if not calls:
            continue
        text = write(form, calls)
        required = compiled(form, CallRules(functions, required=True, parallel=True), special_ids)
        free = compiled(form, CallRules(functions, required=False, parallel=True), special_ids)
        assert admits(required, text, special_ids), row["id"]
        assert admits(free, text, special_ids), row["id"]
        assert not admits(required, "Let me think.", special_ids)
        assert not admits(required, text.replace(calls[0][0], "unknown_function"), special_ids)
        assert not admits(required, text[:-1], special_ids)


def _in_order(arguments, functions, name):
    """In the order of the schema, which is the one that a grammar asks for."""
    order = list(next(f for f in functions if f.name == name).parameters["properties"])
    return dict(sorted(arguments.items(), key=lambda item: order.index(item[0])))


def _is_valid(arguments, functions, name):
    """Some accepted values do not satisfy their schema, or are objects whose keys stand in another order."""
    schema = next(function for function in functions if function.name == name).parameters
    has_objects = any(isinstance(value, dict | list) for value in arguments.values())
    return not has_objects and jsonschema.Draft202012Validator(schema).is_valid(arguments)


@pytest.mark.parametrize(("form", "special_ids"), FORMS)
@pytest.mark.parametrize("content_schema", [None, CONTENT])
def test_rules(form, special_ids, content_schema):
    one = write(form, [("f", '{"city": "Rom"}')])
    two = write(form, [("f", '{"city": "Rom"}'), ("g", "{}")])
    invalid = write(form, [("f", '{"town": "Rom"}')])
    texts = {"one": one, "two": two, "invalid": invalid, "text": "Rom, I think. {", "after text": f"Hm.{one}"}
    texts |= {"content": '{"ok": true}', "empty": ""}

    def admitted(*, required: bool, parallel: bool, schema: str | None = None) -> set[str]:
        state = compiled(form, CallRules(FUNCTIONS, required, parallel, schema), special_ids)
        return {name for name, text in texts.items() if admits(state, text, special_ids)}

    if content_schema is not None:
        if not form.markup.bare:  # a bare call cannot be told from JSON: such requests are refused
            assert admitted(required=False, parallel=True, schema=content_schema) == {"one", "two", "content"}
            assert admitted(required=False, parallel=False, schema=content_schema) == {"one", "content"}
        return
    several = set() if form is LLAMA3_JSON else {"two"}
    assert admitted(required=True, parallel=True) == {"one"} | several
    assert admitted(required=True, parallel=False) == {"one"}
    free = {"one", "text", "empty"} | ({"content", "after text"} if form is not LLAMA3_JSON else {"after text"})
    assert admitted(required=False, parallel=True) == free | several
    assert admitted(required=False, parallel=False) == free


@pytest.mark.parametrize(("form", "special_ids"), FORMS)
def test_text_is_free_until_a_call_begins(form, special_ids):
    state = compiled(form, CallRules(FUNCTIONS, required=False, parallel=True), special_ids)
    for text in data_files.naughty_strings():
        if not (form.markup.bare and text.lstrip(" \t\r\n") != text) and not text.startswith("{"):
            assert admits(state, text, special_ids), text


@pytest.mark.parametrize(("form", "special_ids"), FORMS)
def test_whatever_is_admitted_reads_as_valid_calls(form, special_ids):
    """Random walks under the masks, by the byte."""
    chance = random.Random(form.name)
    spellings = {token_id: mark for mark, token_id in special_ids.items()}
    state = compiled(form, CallRules(FUNCTIONS, required=True, parallel=True), special_ids)
    num_ended = 0
    for _ in range(40):
        walked = _walk(state, chance)
        if walked is None:
            continue
        num_ended += 1
        text = b"".join(spellings[i].encode() if i in spellings else bytes([i]) for i in walked).decode()
        content, calls = read(form, list(text), frozenset(SCHEMAS))
        assert content == ""
        assert calls
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert num_ended > 10


def test_names_of_parameters_cannot_break_out_of_the_grammar():
    name = '"}\nstart: "x"\n%json {'
    schema = {"type": "object", "properties": {name: {"type": "integer"}, "\u2028 # //": {}}, "required": [name]}
    state = compiled(HERMES, CallRules([CallableFunction("f", schema)], required=True, parallel=True), {})
    assert admits(state, write(HERMES, [("f", json.dumps({name: 1}))]), {})
    assert not admits(state, "x", {})


def test_arguments_have_one_spelling_and_names_that_count_once():
    schema = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    state = compiled(HERMES, CallRules([CallableFunction("f", schema)], required=True, parallel=True), {})
    assert admits(state, write(HERMES, [("f", '{"a": 1, "b": "\\n"}')]), {})
    for arguments in ('{"a": 1, "\\u0061": "x"}', '{"\\u0061": "x"}', '{"a": 1, "a": "x"}'):
        assert not admits(state, write(HERMES, [("f", arguments)]), {})


def test_hundreds_of_functions_make_one_grammar():
    functions = {t["function"]["name"]: t["function"] for row in data_files.function_calls() for t in row["tools"]}
    many = [CallableFunction(name, function["parameters"]) for name, function in functions.items()]
    state = compiled(HERMES, CallRules(many, required=True, parallel=True), {})
    assert len(many) > 100
    assert all(admits(state, write(HERMES, [(f.name, "{}")]), {}) for f in many if not f.parameters.get("required"))


def _walk(state: GrammarState, chance: random.Random) -> list[int] | None:
    """Random tokens as far as the grammar goes; None if it takes too long."""
    state = state.fork()
    walked: list[int] = []
    while not (state.is_complete or (state.may_end and chance.random() < 0.5)):
        mask = state.bitmask()
        allowed = [i for i in range(258) if mask[i >> 3] >> (i & 7) & 1]
        closing = [i for i in allowed if i < 256 and chr(i) in '"}]']
        walked.append(chance.choice(closing if closing and chance.random() < 0.5 else allowed))
        assert state.accept(walked[-1])
        if len(walked) > 600:
            return None
    return walked
