"""GBNF as Lark: the same language, by the grammar library over single bytes; and what is refused in which words."""

import pytest

from scheduler.grammar import GrammarCompiler, Vocabulary
from scheduler.sampling_params import StructuredOutput
from server.protocol.gbnf import GrammarError, lark_of

# llama.cpp's own grammar for JSON.
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.fixture(scope="module")
def compiler():
    tokens = [bytes([byte]) for byte in range(256)]
    return GrammarCompiler(Vocabulary(tokens, (), lambda text: list(text.encode())), 256)


def matches(state, text):
    state = state.fork()
    return all(state.accept(byte) for byte in text.encode()) and state.may_end


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (JSON, ["{}", '{"a": [1, 2.5e3, "x\\n\\u00e9"], "b": {"c": null}}', '{ "a":1}\n  '], ['{"a":}', "[]", '{"a"']),
        (r'root ::= "\u0041b" | "\xe9" | "\U0001F600"', ["Ab", "é", "😀"], ["", "A", "u0041b"]),
        ('root ::= [a-z]+ "end"', ["aend", "aendxend", "endend"], ["end", "aendx", "end!"]),  # not greedy
        ('root ::= word "s"\nword ::= [a-z]+', ["as", "ss", "asas"], ["s", "a", "asb"]),
        ('root ::= . "x" .', ["\nx\n", "éxx", "😀xa"], ["x", "xx", "abc"]),
        ("root ::= [&&~~a-]+", ["a&~-"], ["b", ""]),
        (r"root ::= [^\n\]\[]+", ["ab^\\"], ["a\n", "]", "["]),
        (r'root ::= [\x2d\x5e] "\t\r\"\\\[\]"', ['-\t\r"\\[]', '^\t\r"\\[]'], ["a"]),
        ('root ::= x\nx ::= "a" x "b" | ""', ["", "ab", "aabb"], ["aab", "abb", "ba"]),
        ('root ::= x?\nx ::= "a" x{2,3} | "b"', ["", "b", "abb", "abbb", "aabbb"], ["ab", "abbbb"]),
        (
            'root ::= expr\nexpr ::= term (("+"|"-") term)*\nterm ::= num | "(" expr ")"\nnum ::= [0-9]+',
            ["1+2", "(1+(2-33))", "((7))"],
            ["1+", "()", "1 + 2"],
        ),
        ('root ::= "/" ".*" "{1}" "(" "|" ")"', ["/.*{1}(|)"], ["//", "/aa1(|)"]),
        ('root ::= a-b a_b\na-b ::= "x"\na_b ::= "y"', ["xy"], ["yx"]),
        ('root ::= "a"{2} "b"{2,} "c"{0,1}', ["aabb", "aabbbbc"], ["abb", "aab", "aabbcc"]),
        ('root ::= (\n  "a" # first\n  |\n  "b"\n)\n\n# end', ["a", "b"], ["", "ab"]),
        ('root ::= "a" |\n  "b"', ["a", "b"], [""]),
        ('root ::= "a" root{0}', ["a"], ["aa", ""]),
        ('root ::= "a" x{0,0} "b" y\nx ::= "x" x\ny ::= "c" y{0} | "(" y ")"', ["abc", "ab((c))"], ["axb", "abcc"]),
        ("root ::= []", [], ["", "a"]),
    ],
)
def test_the_language_stays_the_same(compiler, grammar, right, wrong):
    lark = lark_of(grammar)
    if not right:
        return
    state = compiler.compile(StructuredOutput("grammar", lark))
    assert [text for text in right if not matches(state, text)] == []
    assert [text for text in wrong if matches(state, text)] == []


@pytest.mark.parametrize(
    "lark", ['start: "a"', '// note\nstart : "a" | "b"', '%llguidance {}\n\nstart: "a"', "x: /a/\nstart: x"]
)
def test_lark_stays_as_it_is(lark):
    assert lark_of(lark) == lark


def chain(length):
    return "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(length)) + f'r{length} ::= "x"'


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("", "no rule named root"),
        ('other ::= "a"', "no rule named root"),
        ('root = "a"', "line 1 should have ::= where it has '= \"a\"'"),
        ('root ::= "a', "line 1 should have the end of a string"),
        ("\n\nroot ::= [a-", "line 3 should have the end of a string"),
        ("root ::= [z-a]", "a range that begins before it ends"),
        ("root ::= foo", "'foo' is used and not defined"),
        ('root ::= "\\q"', "an escape that GBNF has"),
        ('root ::= "\\ud800"', "a character"),
        ('root ::= ("a"', "should have \\) where it ends"),
        ('root ::= "a" )', "the end of the line"),
        ('root ::= "a"{3,1}', "whose most is not below its least"),
        ('root ::= "a"{', "{m}"),
        ("root ::= <[1]>", "an element of a rule"),
        ('root ::= !"a"', "an element of a rule"),
        ("root ::= " + "(" * 65 + '"a"' + ")" * 65, "nested deeper than 64 levels"),
        (chain(3000), "refer to one another too deeply"),
    ],
)
def test_what_is_malformed_is_refused_where_it_is(grammar, words):
    with pytest.raises(GrammarError, match=words) as refused:
        lark_of(grammar)
    assert len(str(refused.value)) < 200


LONG = 'x ::= "a" x | "b"\nr ::= "' + "a" * 5000 + '"'


@pytest.mark.parametrize(
    ("before", "filler", "after"),
    [
        *(("", filler, "") for filler in ("\n", "\r\n", " ", "\t", "\n ", "#", "#\n", "a", "1", "start\n", "%")),
        *(("start", filler, "") for filler in ("\n", " ", "\n\t")),
        *(('root ::= "a"' + counts, " ", "x") for counts in ("{", "{1", "{1,", "{1 , 2")),
        *(("root ::= ", filler, "") for filler in ("(", "|", "a ", "root ", '"a" ', "[]", '"', "[", "#")),
        *(('root ::= "a"', filler, "") for filler in ("*", "{2}", "?+", " \n", "|\n", ")")),
        ("root ::= " + "(" * 60, '"" ', "root" + ")?" * 60),
        ("root ::= " + '("" ' * 60, '"" ', "root" + ")?" * 60),
        ("root ::= x ", "r ", "\n" + LONG),
        ("root ::= ", "x r r ", "\n" + LONG),
        ("root ::= ", "r ", "\n" + LONG),
    ],
)
def test_the_largest_grammar_of_any_filler_is_read_in_no_time(before, filler, after):
    """Where it would take more than linear time, this takes minutes; where rules multiply, gigabytes."""
    room = (64 << 10) - len(before) - len(after)
    try:
        lark = lark_of(before + filler * (room // len(filler)) + after)
    except GrammarError as refused:
        assert len(str(refused)) < 200
    else:
        assert len(lark) < 1 << 20


def test_rules_that_multiply_stay_rules(compiler):
    doubling = "root ::= r0 root?\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(20)) + 'r20 ::= "x"'
    lark = lark_of(doubling)
    assert len(lark) < 1 << 18
    state = compiler.compile(StructuredOutput("grammar", lark))
    assert state.accept(ord("x"))
