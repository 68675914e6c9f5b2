"""Tool calls out of an answer's text: every form, real calls, broken ones, and any way of cutting the text."""

import json
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.tool_parsers.events import ChatEvent, ContentDelta, ToolCallArguments, ToolCallBegin
from server.tool_parsers.formats import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_NAME_FIRST,
    ToolCallForm,
    tool_call_form,
)
from tests import data_files
from tests.server import chat_templates

FORMS = [HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_NAME_FIRST]
NAMES = frozenset({"f", "g"})
CALL = '<tool_call>{"name": "f"}</tool_call>'
Calls = list[tuple[str, str]]


def write(form: ToolCallForm, calls: Iterable[tuple[str, str]]) -> str:
    """Calls as a model of this form writes them; arguments are JSON texts."""
    objects = [f'{{"name": "{name}", "{form.arguments_key}": {arguments}}}' for name, arguments in calls]
    if form is HERMES:
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects)
    if form is LLAMA3_JSON:
        return "; ".join(objects)
    if form is MISTRAL:
        return f"[TOOL_CALLS][{', '.join(objects)}]"
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)


def fold(events: Iterable[ChatEvent]) -> tuple[str, Calls]:
    """What a client puts together."""
    content, calls = "", []
    for event in events:
        match event:
            case ContentDelta(text):
                assert text, "an empty piece"
                content += text
            case ToolCallBegin(position, call_id, name):
                assert position == len(calls)
                assert call_id
                calls.append((name, ""))
            case ToolCallArguments(position, text):
                assert text, "an empty piece"
                assert position == len(calls) - 1
                calls[position] = (calls[position][0], calls[position][1] + text)
    return content, calls


def read(
    form: ToolCallForm, pieces: Sequence[str], names: frozenset[str] = NAMES, *, calls_only: bool = False
) -> tuple[str, Calls]:
    reader = form.reader(names, calls_only=calls_only)
    events = [event for piece in pieces for event in reader.push(piece)]
    return fold([*events, *reader.finish()])


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_real_calls_come_back_as_they_were(form):
    for row in data_files.function_calls():
        names = frozenset(tool["function"]["name"] for tool in row["tools"])
        calls = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in row["calls"]]
        if calls:
            text = write(form, calls)
            assert read(form, [text], names) == ("", calls), row["id"]
            assert read(form, list(text), names) == ("", calls), row["id"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text() | st.sampled_from(["name", "arguments", "</tool_call>"]), JSON, max_size=4)
CONTENT = st.text(st.sampled_from(list("ab {}[]<>|\n\"'é😀")), max_size=12)
PIECES = [
    *["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]ab", "<tool", "[TOOL"],
    *['{"name": "f", ', '"arguments": ', '"parameters": ', '{"a": [1, "}"]}', '"{\\"a\\": 1}"', "null", '{"b": "x'],
    *["}", "]", "[", ",", ";", "\n", "  ", '"', "\\", "f", "g{", "hello", '"name": "g"', "{", ": ", "7", "é"],
]


@given(
    form=st.sampled_from(FORMS),
    before=CONTENT,
    calls=st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS, st.booleans()), min_size=1, max_size=3),
    places=st.lists(st.integers(0, 10_000), max_size=30),
)
@settings(max_examples=200, deadline=None)
def test_calls_after_any_text_in_any_pieces(form, before, calls, places):
    written = [(name, json.dumps(arguments, ensure_ascii=ascii_only)) for name, arguments, ascii_only in calls]
    if form is LLAMA3_JSON:
        before = f"{before}<|python_tag|>" if before.strip() else ""
    text = before + write(form, written)
    content, read_calls = read(form, cut(text, places))
    assert read_calls == written
    assert content == before.removesuffix("<|python_tag|>").rstrip()
    assert [json.loads(arguments) for _, arguments in read_calls] == [arguments for _, arguments, _ in calls]


@given(
    form=st.sampled_from(FORMS),
    pieces=st.lists(st.sampled_from(PIECES) | CONTENT, max_size=16),
    places=st.lists(st.integers(0, 10_000), max_size=40),
)
@settings(max_examples=600, deadline=None)
def test_any_text_reads_the_same_in_any_pieces(form, pieces, places):
    text = "".join(pieces)
    whole = read(form, [text])
    assert read(form, cut(text, places)) == whole
    assert read(form, list(text)) == whole
    if not whole[1]:
        assert whole[0] == text


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_text_without_calls_is_content_to_the_letter(form):
    for text in data_files.naughty_strings():
        assert read(form, [text]) == (text, [])
        assert read(form, list(text)) == (text, [])


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, "hi \n<tool_call>{}</tool_call>", "hi \n<tool_call>{}</tool_call>", []),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call> b ', " b ", [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}}\nSo', "\nSo", [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1\n</tool_call>!', "!", [("f", '{"a": [1\n')]),
        (HERMES, '<tool_call>{"arguments": {}, "name": "f"}</tool_call>', "", [("f", "{}")]),
        (HERMES, '<tool_call>[{"name": "f"}, {"name": "g", "id": 7}]</tool_call>', "", [("f", "{}"), ("g", "{}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": null}', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "', "", [("f", '{"a": "')]),
        (HERMES, '<tool_call>{"name": "no such name"}', '<tool_call>{"name": "no such name"}', []),
        (HERMES, '<tool_call>{"name": "\\ud800"}', '<tool_call>{"name": "\\ud800"}', []),
        (HERMES, '\n<tool_call>{"name": "f"}</tool_call>\n \n', "", [("f", "{}")]),
        (HERMES, 'a\n<tool_call>{"name": "f"}</tool_call>\n\nb ', "a\n\nb ", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
        (HERMES, "a <tool_c", "a <tool_c", []),
        (HERMES, f"a{CALL} b <tool_c", "a b <tool_c", [("f", "{}")]),
        (HERMES, f"a{CALL} b <tool_call>{{", "a b", [("f", "{}")]),
        (HERMES, f"{CALL} <tool_call>no", " <tool_call>no", [("f", "{}")]),
        (LLAMA3_JSON, '{"name": "f", "parameters": {}}; {"name": "g', "", [("f", "{}")]),
        (LLAMA3_JSON, '{"name": "h", "parameters": {}}', '{"name": "h", "parameters": {}}', []),
        (LLAMA3_JSON, '{"name": "f", "age": 3}', '{"name": "f", "age": 3}', []),
        (LLAMA3_JSON, '<|python_tag|>{"name": "h", "parameters": {}}', "", [("h", "{}")]),
        (LLAMA3_JSON, '<|python_tag|> {"x": 1}', '<|python_tag|> {"x": 1}', []),
        (LLAMA3_JSON, ' {"name": 1} <|python_tag|>{"name": "f"}', ' {"name": 1}', [("f", "{}")]),
        (LLAMA3_JSON, '<|python_tag|>search(q="x")', '<|python_tag|>search(q="x")', []),
        (MISTRAL, "[TOOL_CALLS] hello", "[TOOL_CALLS] hello", []),
        (MISTRAL, '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"b": 2} done', " done", [("f", '{"b": 2}')]),
    ],
)
def test_broken_and_unusual_calls(form, text, content, calls):
    assert read(form, [text]) == (content, calls)
    assert read(form, list(text)) == read(form, [text])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_cut_never_shows_the_markup_of_calls(form):
    calls = [("f", '{"a": "x"}'), ("g", "{}")]
    text = write(form, calls)
    for end in range(len(text) + 1):
        content, cut_calls = read(form, [text[:end]], calls_only=True)
        assert content == ""
        assert [name for name, _ in cut_calls] == ["f", "g"][: len(cut_calls)]
        if cut_calls:
            assert read(form, list(text[:end])) == ("", cut_calls)
        else:
            assert read(form, [text[:end]]) == (text[:end], [])


def test_arguments_are_handed_out_as_they_come():
    reader = HERMES.reader(NAMES)
    events = reader.push('<tool_call>\n{"name": "f", "arguments": {"text": "once upon')
    assert fold(events) == ("", [("f", '{"text": "once upon')])
    assert reader.push(" a time") == [ToolCallArguments(0, " a time")]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_reading_takes_linear_time(form):
    """By the number of characters that are looked at again: none of what was handed out is kept."""
    long = json.dumps({"a": "x" * 50_000, "b": [["y"] * 5] * 2000})
    reader = form.reader(NAMES)
    text = write(form, [("f", long)])
    sizes = []
    for start in range(0, len(text), 16):
        reader.push(text[start : start + 16])
        sizes.append(len(reader._unread) + len(reader._call.rest))
    assert max(sizes) < 600


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_call_ids_are_what_templates_take(form):
    events = form.reader(NAMES).push(write(form, [("f", "{}"), ("g", "{}")]))
    ids = [event.call_id for event in events if isinstance(event, ToolCallBegin)]
    pattern = r"[a-zA-Z0-9]{9}" if form.name == "mistral" else r"call_[0-9a-f]{24}"
    assert len(set(ids)) == 2
    assert all(re.fullmatch(pattern, call_id) for call_id in ids)


def test_a_models_form_is_found_in_its_template():
    assert tool_call_form(chat_templates.QWEN_TOOLS, None) is HERMES
    assert tool_call_form(chat_templates.LLAMA, None) is LLAMA3_JSON
    assert tool_call_form(chat_templates.MISTRAL_TOOLS, None) is MISTRAL
    assert tool_call_form(chat_templates.MISTRAL_TOOLS.replace("] [", "]f[ARGS]"), None) is MISTRAL_NAME_FIRST
    assert tool_call_form("{{ tools }}", None) is None
    assert tool_call_form("<tool_call><function={{ tools }}>", None) is None
    assert tool_call_form("{{ tools }}", "llama3_json") is LLAMA3_JSON
