"""Grammars over small vocabularies: each kind, what may follow, when it may end, and what is refused in which words."""

import json
from random import Random

import llguidance
import pytest

from scheduler import grammar as grammar_module
from scheduler.grammar import GrammarCompiler, GrammarError, MaskComputer, Vocabulary, with_end_tokens
from scheduler.json_schema import grammar_schema
from scheduler.sampling_params import StructuredOutput
from tests.scheduler.fake_runner import allowed_tokens

WORDS = [b'{"', b'":', b"true", b"<end>", b"ab", b"\xc3\xa9x", b"  ", b"<end>"]
VOCABULARY = [bytes([byte]) for byte in range(256)] + WORDS
SPECIAL = VOCABULARY.index(b"<end>")


def make_compiler(tokens=tuple(VOCABULARY), special=(SPECIAL,), vocab_size=None, encode=None):
    plain = encode or (lambda text: list(text.encode()))
    return GrammarCompiler(Vocabulary(tokens, special, plain), vocab_size or len(tokens))


@pytest.fixture(scope="module")
def compiler():
    return make_compiler()


def follow(state, text):
    """Whether a text can be an answer byte by byte, by the mask as well as by what is taken."""
    state = state.fork()
    for byte in text.encode():
        if byte not in allowed_tokens(state.bitmask()) or not state.accept(byte):
            return False
    return state.may_end


@pytest.mark.parametrize(
    ("kind", "value", "right", "wrong"),
    [
        (
            "json_object",
            "",
            ["{}", '{"a": [1, null]}', '{\n  "é": "\\n\\"\\\\"\n}'],
            ["", "[]", "1", "{", '{"a"}', '{"a": "\\u001f"}'],
        ),
        ("json_schema", '{"type": "integer"}', ["0", "-12"], ["1.5", "true", '"1"', "01"]),
        ("json_schema", "true", ["0", "[]", "null"], ["nil"]),
        ("regex", r"\d{3}-[a-c]+", ["123-a", "000-cab"], ["123-", "12-a", "123-d"]),
        ("regex", "^a|b$", ["a", "b"], ["ab", ""]),
        (
            "choice",
            json.dumps(["yes", "yes please", 'a"b\\c', ".*", "né"]),
            ["yes", "yes please", 'a"b\\c', ".*"],
            ["y"],
        ),
        ("grammar", 'start: "[" start? "]"', ["[]", "[[]]"], ["[", "][", ""]),
        ("grammar", 'start: "f(" args ")"\nargs: %json {"type": "boolean"}', ["f(true)"], ["f(1)"]),
    ],
)
def test_each_kind_allows_its_language_and_nothing_else(compiler, kind, value, right, wrong):
    state = compiler.compile(StructuredOutput(kind, value))
    assert [text for text in right if not follow(state, text)] == []
    assert [text for text in wrong if follow(state, text)] == []


@pytest.mark.parametrize(
    ("whitespace", "right", "wrong"),
    [
        (None, ['{"a":1}', '{"a": 1}', '{\n  "a" : 1\n}'], ['{"a":  1}', '{"a":\n\n\n1}', '{"a":\t1}']),
        ("", ['{"a":1}'], ['{"a": 1}', '{\n"a":1}']),
        ("[ \t]{0,3}", ['{"a":1}', '{"a":\t  1}'], ['{"a":    1}', '{"a":\n1}']),
    ],
)
def test_whitespace_between_the_tokens_of_json_is_bounded_or_as_asked_for(compiler, whitespace, right, wrong):
    schema = '{"properties": {"a": {"const": 1}}, "required": ["a"], "type": "object"}'
    state = compiler.compile(StructuredOutput("json_schema", schema, whitespace))
    assert [text for text in right if not follow(state, text)] == []
    assert [text for text in wrong if follow(state, text)] == []


def test_a_complete_answer_is_told_from_one_that_may_go_on(compiler):
    state = compiler.compile(StructuredOutput("regex", "ab?"))
    assert (state.may_end, state.is_complete) == (False, False)
    state.accept(ord("a"))
    assert (state.may_end, state.is_complete) == (True, False)
    state.accept(ord("b"))
    assert (state.may_end, state.is_complete) == (True, True)


def test_forks_go_their_own_ways(compiler):
    state = compiler.compile(StructuredOutput("choice", '["ab", "ac"]'))
    state.accept(ord("a"))
    other = state.fork()
    other.accept(ord("b"))
    assert other.is_complete
    assert not state.is_complete
    assert allowed_tokens(state.bitmask()) == [ord("b"), ord("c")]


def test_a_token_that_is_not_allowed_is_refused(compiler):
    for pattern in ("ab", "a*"):
        state = compiler.compile(StructuredOutput("regex", pattern))
        assert state.may_end == (pattern == "a*")
        assert not state.accept(ord("x"))
        assert (state.may_end, state.is_complete) == (False, False)
        assert not any(state.bitmask())
        assert "doesn't satisfy" in state.error
        assert not state.is_too_costly


def test_a_text_that_the_vocabulary_cannot_spell_is_a_dead_end_and_no_fault():
    vocabulary = [token for token in VOCABULARY[:SPECIAL] if b"g" not in token]
    compiler = GrammarCompiler(Vocabulary(vocabulary, (), lambda text: []), len(vocabulary))
    state = compiler.compile(StructuredOutput("regex", "ag"))
    assert allowed_tokens(state.bitmask()) == [ord("a")]
    assert state.accept(ord("a"))
    assert not any(state.bitmask())
    assert (state.error, state.may_end) == (None, False)
    with pytest.raises(GrammarError, match="it allows no answer"):
        compiler.compile(StructuredOutput("regex", "g"))


def test_a_failure_of_the_library_shows_nothing_of_the_program():
    def encode(_text):
        raise KeyError("secret")

    with pytest.raises(GrammarError) as failed:
        make_compiler(encode=encode).compile(StructuredOutput("regex", "abc"))
    assert str(failed.value) == "the grammar library fails on it"


def test_special_tokens_are_never_spelled_as_text_and_can_be_named(compiler):
    by_text = compiler.compile(StructuredOutput("regex", "<end>"))
    # Not the special one, and not a byte: what is forced is allowed in the tokenizer's own spelling alone.
    assert allowed_tokens(by_text.bitmask()) == [ord("<")]
    named = compiler.compile(StructuredOutput("grammar", 'start: "a" <end>'))
    named.accept(ord("a"))
    assert allowed_tokens(named.bitmask()) == [SPECIAL]
    by_id = compiler.compile(StructuredOutput("grammar", f'start: "a" <[{SPECIAL}]>'))
    by_id.accept(ord("a"))
    assert allowed_tokens(by_id.bitmask()) == [SPECIAL]


def test_a_text_that_is_forced_never_takes_a_special_token_or_a_space_of_the_tokenizers_own():
    for encode in (lambda text: [SPECIAL], lambda text: [ord(" "), *text.encode()], lambda text: [10**6]):
        state = make_compiler(encode=encode).compile(StructuredOutput("regex", "<end> abé"))
        taken = []
        while not state.is_complete:
            [token_id] = allowed_tokens(state.bitmask())
            assert state.accept(token_id)
            taken.append(VOCABULARY[token_id])
        assert b"".join(taken) == "<end> abé".encode()
        assert VOCABULARY.index(b"<end>", SPECIAL + 1) in [VOCABULARY.index(t, SPECIAL + 1) for t in taken[:1]]


def test_of_a_long_text_that_is_forced_only_the_beginning_is_tokenised_for_each_token():
    asked = []

    def encode(text):
        asked.append(len(text))
        return list(text.encode())

    text = "lorem ipsum é " * 400
    state = make_compiler(encode=encode).compile(StructuredOutput("choice", json.dumps([text])))
    for byte in text.encode():
        assert allowed_tokens(state.bitmask()) == [byte]
        assert state.accept(byte)
    assert state.is_complete
    assert max(asked) <= 256


@pytest.mark.parametrize("vocab_size", [256, 257, 264, 288, 300])
def test_masks_have_whole_words_and_no_token_that_the_model_has_not(vocab_size):
    compiler = make_compiler(vocab_size=vocab_size)
    state = compiler.compile(StructuredOutput("regex", r"(.|\n)*"))
    mask = state.bitmask()
    assert len(mask) == 4 * -(-vocab_size // 32)
    allowed = allowed_tokens(mask)
    assert max(allowed) < min(vocab_size, len(VOCABULARY))
    assert set(range(128)) <= set(allowed)
    assert SPECIAL not in allowed


def test_end_tokens_are_added_and_the_last_resort_only_where_nothing_else_is():
    mask = bytes([0b100, 0, 0, 0])
    assert allowed_tokens(with_end_tokens(mask, (9, 31), (5,))) == [2, 9, 31]
    assert allowed_tokens(with_end_tokens(mask, (), (5,))) == [2]
    assert allowed_tokens(with_end_tokens(bytes(4), (), (5, 6))) == [5, 6]
    assert allowed_tokens(with_end_tokens(bytes(4), (), ())) == []
    assert allowed_tokens(with_end_tokens(mask, (32, 10**9), ())) == [2]


def test_masks_are_the_same_on_one_core_and_on_several(compiler, monkeypatch):
    states = []
    for number in range(20):
        state = compiler.compile(StructuredOutput("regex", f"[a-z]{{{number + 1}}}|0{number}"))
        states.append(state)
    states[3].accept(ord("!"))  # one that has failed
    alone = MaskComputer().bitmasks(states)
    monkeypatch.setattr(grammar_module, "_MIN_PARALLEL_CORES", 1)
    assert MaskComputer().bitmasks(states) == alone
    assert not any(alone[3])
    assert all(any(mask) for place, mask in enumerate(alone) if place != 3)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("json_schema", '{"not": {"type": "null"}, "if": true}', "not supported: if, not|not supported: not, if"),
        ("json_schema", '{"items": {"uniqueItems": true}}', "uniqueItems"),
        ("json_schema", '{"oneOf": [{"minimum": 1}, {"maximum": 3}]}', "oneOf"),
        ("json_schema", '{"type": "string", "format": "uri-template"}', "format uri-template"),
        ("json_schema", '{"$ref": "#/$defs/none"}', "none"),
        ("json_schema", '{"$ref": "#"}', "stands for nothing but itself$"),
        ("grammar", "start: a\na: start", "stands for nothing but itself$"),
        ("json_schema", '{"$ref": "http://example.com/schema"}', "example.com"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", "false", "allows no answer"),
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "null"}]}', "Unsatisfiable"),
        ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "not supported: not"),
        ("regex", "(", "unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", "", "empty"),
        ("grammar", "start: foo", "foo"),
        ("grammar", "nonsense", "nonsense"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_words_that_name_it(compiler, kind, value, words):
    with pytest.raises(GrammarError, match=words) as refused:
        compiler.compile(StructuredOutput(kind, value))
    message = str(refused.value)
    assert len(message) <= 320
    assert "\n" not in message
    assert "coerce_one_of" not in message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2500)}},
        {"type": "integer", "multipleOf": 999983, "minimum": 1, "maximum": 10**15},
        {"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghij"]},
        {"allOf": [{"anyOf": [{"properties": {f"k{i}": {"const": j}}} for j in range(2)]} for i in range(14)]},
    ],
)
def test_what_costs_too_much_is_refused(compiler, schema):
    with pytest.raises(GrammarError):
        compiler.compile(StructuredOutput("json_schema", json.dumps(schema)))


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
def test_choices_in_choices_are_no_bomb(compiler, keyword):
    schemas = [{"const": str(number)} for number in range(1 << 10)]
    while len(schemas) > 1:
        schemas = [{keyword: [left, right]} for left, right in zip(schemas[::2], schemas[1::2], strict=True)]
    wanted = StructuredOutput("json_schema", json.dumps(schemas[0]))
    assert follow(compiler.compile(wanted), '"1023"')


OPEN = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}, "type": "object"}
EDGE = 9223372036854774784  # the largest integer of 64 bits that is a double


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (OPEN, ['{"a":1,"b":"x"}'], ['{"a":1,"\\u0061":"x"}', '{"\\u0061":"x"}', '{"a":"x"}']),
        ({"patternProperties": {"^a": {"type": "integer"}}}, ['{"ab":1,"b":"x"}'], ['{"\\u0061b":"x"}', '{"ab":"x"}']),
        ({"properties": {"\x01/é": {"type": "integer"}}, "type": "object"}, ["{}"], ['{"\\u0001\\/é":"x"}']),
        ({"required": ["a"], "minProperties": 2, "type": "object"}, ['{"a":1,"b":2}'], ['{"a":1}', '{"a":1,"a":2}']),
        ({"required": ["a", "b"], "minProperties": 2, "type": "object"}, ['{"a":1,"b":2}'], ['{"a":1,"a":2}']),
        ({"minProperties": 1, "type": "object"}, ['{"x":1}'], ["{}"]),
        ({"enum": [2**53, -(2**53), 2**60]}, [str(2**53), str(-(2**53)), str(2**60)], [str(2**53 + 1)]),
        ({"enum": [0.1, 1e-7, 1.5e3]}, ["0.1", "0.0000001", "1500"], ["0.2", "0.000001", "15"]),
        ({"type": "integer", "maximum": 2**53 + 1}, [str(2**53), "-1"], [str(2**53 + 1), str(2**53 + 2)]),
        ({"type": "integer", "exclusiveMinimum": 2**53 + 1}, [str(2**53 + 9)], [str(2**53 + n) for n in range(3)]),
        ({"type": "integer", "exclusiveMaximum": -(2**53)}, [str(-(2**53) - 9)], [str(-(2**53)), "0"]),
        (
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            [str(EDGE), str(-EDGE), "0"],
            [str(2**63), str(-(2**63) - 1)],
        ),
        ({"type": "number", "minimum": -1e300, "exclusiveMaximum": 10**400}, ["-1.5", "7"], ['"x"']),
        ({"minimum": -(2**70), "maximum": -5, "type": "integer"}, ["-5", str(-(10**15))], ["-4", "0"]),
    ],
)
def test_what_a_grammar_could_take_for_something_else_is_as_the_schema_has_it(compiler, schema, right, wrong):
    state = compiler.compile(StructuredOutput("json_schema", json.dumps(schema)))
    assert [text for text in right if not follow(state, text)] == []
    assert [text for text in wrong if follow(state, text)] == []


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"minProperties": 2}, "minProperties for more than one name"),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 2}, "minProperties"),
        ({"anyOf": [{"required": ["a", "a"], "minProperties": 3}]}, "minProperties"),
        ({"required": ["x"], "patternProperties": {"^x": {}}, "minProperties": 3.0}, "minProperties"),
        ({"components": {"A": {"minProperties": 2}}, "$ref": "#/components/A"}, "minProperties"),
        ({"enum": [1, {"a": [2**53 + 1]}]}, "its enum holds an integer that is not exact"),
        *(({"const": value}, "its const holds an? (integer|number)") for value in (-(2**63), 1e22, 10**400, -1e300)),
        ({"items": {"const": float("inf")}}, "its const is a number that JSON does not have"),
        ({"const": ["\x1f"]}, r"its const holds the control character U\+001F"),
        ({"minimum": 2**63}, "its minimum leaves no number"),
        ({"exclusiveMaximum": -(2**63)}, "its exclusiveMaximum leaves no number"),
        ({"x": [{"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}], "$ref": "#/x/0"}, "below"),
    ],
)
def test_what_it_would_take_for_something_else_is_refused(compiler, schema, words):
    """The last one has no end in the library, and takes the whole process with it."""
    with pytest.raises(GrammarError, match=words):
        compiler.compile(StructuredOutput("json_schema", json.dumps(schema)))
    if words == "below":
        with pytest.raises(GrammarError, match=words):
            compiler.compile(StructuredOutput("grammar", f"start: %json {json.dumps(schema)}"))


def test_formats_that_json_schema_does_not_define_say_nothing(compiler):
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "path"},
            "size": {"type": "integer", "format": "int64"},
            "kind": {"enum": [{"format": "path"}, "x"], "format": "semver"},
            "day": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        },
        "required": ["format", "size", "kind", "day"],
        "additionalProperties": False,
    }
    state = compiler.compile(StructuredOutput("json_schema", json.dumps(schema)))
    assert follow(state, '{"format":"a/b","size":3,"kind":{"format":"path"},"day":"2024-02-29"}')
    assert not follow(state, '{"format":"a/b","size":3,"kind":"x","day":"tomorrow"}')


def test_formats_are_taken_from_schemas_alone():
    schema = {
        "properties": {"format": {"const": {"format": "x"}}, "a": {"format": "x"}},
        "items": [{"format": "y"}, True],
        "dependencies": {"a": ["format"], "b": {"format": "z"}},
        "examples": [{"format": "x"}],
        "format": {"odd": 1},
    }
    assert grammar_schema(schema) == {
        "properties": {"format": {"const": {"format": "x"}}, "a": {}},
        "items": [{}, True],
        "dependencies": {"a": ["format"], "b": {}},
        "examples": [{"format": "x"}],
        "format": {"odd": 1},
    }


@pytest.mark.parametrize(
    "grammar",
    ['start: ((((x*)*)*)*)*\nx: "a"* | start', 'start: x{1,3000}\nx: y{1,3000}\ny: z{1,3000}\nz: "a" z | "b"'],
)
def test_an_ambiguous_grammar_becomes_too_costly_before_its_masks_hold_up_a_step(compiler, grammar):
    state = compiler.compile(StructuredOutput("grammar", grammar))
    rng = Random(0)
    while allowed := allowed_tokens(state.bitmask()):
        if not state.accept(rng.choice(allowed)):
            break
    assert state.is_too_costly
    assert (state.may_end, state.is_complete) == (False, False)


@pytest.mark.parametrize("limits", [{"step_lexer_fuel": 300}, {"max_lexer_states": 30}])
def test_a_grammar_that_becomes_too_costly_allows_nothing_more_and_no_end(monkeypatch, limits):
    monkeypatch.setattr(grammar_module, "_limits", lambda: llguidance.LLParserLimits(verbose_errors=False, **limits))
    state = make_compiler().compile(StructuredOutput("regex", "(a|b)*a(a|b){50}c"))
    rng, num_taken = Random(0), 0
    while allowed := allowed_tokens(state.bitmask()):
        assert state.accept(rng.choice(allowed))
        num_taken += 1
    assert 0 < num_taken < 50
    assert state.is_too_costly
    assert state.error.startswith("lexer error: too many ")
    assert (state.may_end, state.is_complete) == (False, False)
