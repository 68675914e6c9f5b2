"""Chat templates against transformers' renderer, and the bounds on what a template may do."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from server import template_sandbox
from server.chat_template import ChatTemplate, ChatTemplateError
from tests import data_files
from tests.server import chat_templates
from tests.server.real_tokenizers import smollm2

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {"type": "function", "function": {"name": "wetter", "description": "Wie ist's? <&>", "parameters": {"ü": [1]}}}
CALL = {"type": "function", "function": {"name": "wetter", "arguments": {"ort": "Köln", "n": 1.5}}}

USER = [{"role": "user", "content": "  Hello <b> & 'you' \u2028 😀  "}]
TURNS = [*USER, {"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "More\n\n"}]
SYSTEM = [{"role": "system", "content": "Be kind."}, *TURNS]
QUESTION = {"role": "user", "content": "Wie ist das Wetter?"}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "123456789", "type": "function", "function": {"name": "wetter", "arguments": {"ort": "Köln", "n": 1.5}}},
        {"id": "abcdefghi", "type": "function", "function": {"name": "wetter", "arguments": {}}},
    ],
}
RESULTS = [
    {"role": "tool", "content": '{"grad": 7}', "tool_call_id": "123456789"},
    {"role": "tool", "content": "Regen <&>", "tool_call_id": "abcdefghi"},
]
TOOL_TURNS = [QUESTION, CALLED, *RESULTS, {"role": "assistant", "content": "Regen."}, QUESTION]
TOOLS_USED = [*USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "rain"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
REAL = [
    {"role": role, "content": text}
    for turns in data_files.mt_bench_turns()[:6]
    for role, text in zip(("user", "assistant"), turns, strict=True)
]
NAUGHTY = [{"role": "user", "content": text} for text in data_files.naughty_strings()]

CASES = [
    (chat_templates.LLAMA, [USER, TURNS, SYSTEM, TOOLS_USED, REAL, NAUGHTY]),
    (chat_templates.QWEN, [USER, TURNS, SYSTEM, PARTS, REAL, NAUGHTY]),
    (chat_templates.MISTRAL, [USER, TURNS, REAL]),
    (chat_templates.GEMMA, [USER, TURNS, SYSTEM, PARTS, REAL]),
    (chat_templates.PARTS_ONLY, [PARTS]),
    (chat_templates.CHATML, [USER, TURNS, SYSTEM, REAL, NAUGHTY]),
    (chat_templates.QWEN_TOOLS, [USER, TURNS, SYSTEM, TOOL_TURNS, TOOL_TURNS[:4], REAL, NAUGHTY]),
    (chat_templates.MISTRAL_TOOLS, [USER, TURNS, SYSTEM, TOOL_TURNS, TOOL_TURNS[:4], REAL]),
    (chat_templates.DOCUMENTS, [USER, TURNS]),
]
NAMES = ["llama", "qwen", "mistral", "gemma", "parts", "chatml", "qwen tools", "mistral tools", "documents"]


def reference(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=source, **variables)
    text: str = rendered[0]
    return text


@pytest.mark.parametrize(("source", "conversations"), CASES, ids=NAMES)
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_renders_as_transformers_does(source: str, conversations: list[Any], tools: list[Any] | None) -> None:
    template = ChatTemplate(source, SPECIAL_TOKENS)
    for messages in conversations:
        for prompt in (True, False):
            expected = reference(source, messages, tools=tools, add_generation_prompt=prompt, **SPECIAL_TOKENS)
            assert template.render(messages, tools=tools, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("documents", [None, [{"title": "Köln <&>", "text": "Rain.\n"}, {"title": "b", "n": 1}]])
def test_documents_reach_the_template(documents: list[Any] | None) -> None:
    template = ChatTemplate(chat_templates.DOCUMENTS, SPECIAL_TOKENS)
    expected = reference(
        chat_templates.DOCUMENTS, USER, documents=documents, add_generation_prompt=True, **SPECIAL_TOKENS
    )
    assert template.render(USER, documents=documents) == expected
    assert template.takes("documents")
    assert not template.takes("tools")
    assert ChatTemplate(chat_templates.QWEN_TOOLS, {}).takes("tools")


CONTINUED = ["Sure", "Sure, ", "  Sure,\n\n", "a" * 40, "😀 <&> '", "Sure,", "user"]


@pytest.mark.parametrize(("source", "conversations"), CASES, ids=NAMES)
@pytest.mark.parametrize("text", CONTINUED)
def test_continues_the_final_message_as_transformers_does(source: str, conversations: list[Any], text: str) -> None:
    messages = [*conversations[0], {"role": "assistant", "content": text}]
    template = ChatTemplate(source, SPECIAL_TOKENS)
    if source in (chat_templates.PARTS_ONLY, chat_templates.QWEN):
        # Ours brings a string to templates that loop over parts; this Qwen writes no last message of the assistant.
        if source == chat_templates.PARTS_ONLY:
            messages[-1] = {"role": "assistant", "content": [{"type": "text", "text": text}]}
        else:
            with pytest.raises(ChatTemplateError, match="does not write the final message"):
                template.render(messages, add_generation_prompt=False, continue_final_message=True)
            return
    expected = reference(
        source, messages, tools=None, add_generation_prompt=False, continue_final_message=True, **SPECIAL_TOKENS
    )
    assert template.render(messages, add_generation_prompt=False, continue_final_message=True) == expected


def test_there_must_be_something_to_continue() -> None:
    template = ChatTemplate(chat_templates.CHATML, {})
    with pytest.raises(ChatTemplateError, match="no text"):
        template.render([{"role": "assistant", "content": []}], continue_final_message=True)


def test_further_variables_reach_the_template() -> None:
    template = ChatTemplate(chat_templates.QWEN, SPECIAL_TOKENS)
    assert template.render(USER, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert "<think>" not in template.render(USER)
    date = {"date_string": "1 May 2020"}
    expected = reference(chat_templates.LLAMA, USER, add_generation_prompt=True, tools=None, **SPECIAL_TOKENS, **date)
    assert ChatTemplate(chat_templates.LLAMA, SPECIAL_TOKENS).render(USER, **date) == expected
    documents = [{"title": "a"}]
    assert ChatTemplate("{{ documents[0].title }}", {}).render(USER, documents=documents) == "a"


@pytest.mark.parametrize("name", ["bos_token", "range", "raise_exception", "namespace"])
def test_variables_with_a_meaning_cannot_be_set(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"{name} has a meaning"):
        ChatTemplate(chat_templates.QWEN, SPECIAL_TOKENS).render(USER, **{name: "x"})


def test_smollm2s_own_template() -> None:
    template = smollm2().chat_template
    assert template is not None
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    for messages in (USER, TURNS, SYSTEM, REAL, NAUGHTY):
        assert template.render(messages) == reference(template.source, messages, add_generation_prompt=True, **names)
    assert template.render(PARTS).endswith("<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n")


def test_text_parts_reach_templates_that_take_only_strings() -> None:
    for source in (chat_templates.MISTRAL, smollm2().chat_template.source):  # type: ignore[union-attr]
        template = ChatTemplate(source, SPECIAL_TOKENS)
        assert template.render(PARTS) == template.render([{"role": "user", "content": "one\ntwo"}])
    with pytest.raises(ChatTemplateError, match="takes text only"):
        ChatTemplate(chat_templates.MISTRAL, SPECIAL_TOKENS).render(
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
        )


def test_strings_reach_templates_that_take_only_parts() -> None:
    template = ChatTemplate(chat_templates.PARTS_ONLY, {})
    assert template.render(SYSTEM[:1]) == "system:[Be kind.]"
    renamed = "{% for m in messages %}{% set c = m['content'] %}{% for p in c %}{{ p['text'] }}{% endfor %}{% endfor %}"
    assert ChatTemplate(renamed, {}).render(SYSTEM[:1]) == "Be kind."


def test_the_callers_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    ChatTemplate(chat_templates.MISTRAL, SPECIAL_TOKENS).render(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    with pytest.raises(ChatTemplateError, match="line 1"):
        ChatTemplate("{{ messages.append(1) }}", {}).render(messages)
    with pytest.raises(ChatTemplateError, match="line 1"):
        ChatTemplate("{{ messages[0].update(role='x') }}", {}).render(messages)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (chat_templates.MISTRAL, r"failed in line 3: Conversation roles must alternate"),
        ("\n\n{{ messages[0].content + 1 }}", "failed in line 3: can only concatenate str"),
        ("{% for x in y.z %}{% endfor %}", "failed in line 1: 'y' is undefined"),
        ("a\n{% if %}", r"does not compile \(line 2: Expected an expression"),
        ("{% endfor %}", r"does not compile \(line 1: Encountered unknown tag 'endfor'"),
        ("{{ ''.__class__.__mro__ }}", "failed in line 1: access to attribute '__class__'.* is unsafe"),
        ("{{ messages | tojson }}{{ raise_exception }}{{ x() }}", "failed in line 1: 'x' is undefined"),
    ],
)
def test_a_failure_names_its_line_and_reason(source: str, message: str) -> None:
    template = ChatTemplate(source, SPECIAL_TOKENS)
    with pytest.raises(ChatTemplateError, match=message):
        template.render([{"role": "assistant", "content": "hi"}])


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(10**12) %}{% endfor %}",
        "{% macro f(n) %}{% for i in range(1000) %}{{ f(n) if n }}{% endfor %}{% endmacro %}{{ f(1) }}",
        "{% for i in range(1000) %}{{ 'x' * 100000 }}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ [0] * 10**9 }}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_a_template_that_writes_or_loops_without_end_is_ended(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=re.compile("in line 1|writes more|recursion", re.IGNORECASE)):
        ChatTemplate(source, {}).render(USER)


LOOP = "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}{% endfor %}{% endfor %}"
MACROS = "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else 1 }}{% endmacro %}{{ f(60) }}"


@pytest.mark.parametrize("source", [LOOP, MACROS, LOOP.replace("{% for c", "{% set octavo = 1 %}{% for c")])
def test_a_template_that_burns_time_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_CPU_SECONDS", 0.2)
    messages = [{"role": "user", "content": "x"}] * 3000
    with pytest.raises(ChatTemplateError, match=r"line 1: it runs for more than 0\.2 seconds"):
        ChatTemplate(source, {}).render(messages)


@pytest.mark.parametrize(
    "source", ["{% set octavo_tick = 1 %}", "{{ octavo_concat }}", "{% macro octavo_tick() %}{% endmacro %}"]
)
def test_a_template_cannot_replace_its_clock(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="octavo"):
        ChatTemplate(source + LOOP, {}).render(USER)


DOUBLING = "{{% set ns = namespace(x='ab') %}}{{% for i in range(60) %}}{{% set ns.x = {} %}}{{% endfor %}}"


@pytest.mark.parametrize(
    "source",
    [
        DOUBLING.format("ns.x ~ ns.x"),
        DOUBLING.format("ns.x.replace('a', ns.x)"),
        DOUBLING.format("ns.x | replace('a', ns.x)"),
        DOUBLING.format("ns.x.join([ns.x, ns.x])"),
        DOUBLING.format("[ns.x, ns.x] | join(ns.x)"),
        DOUBLING.format("[ns.x, ns.x] | tojson"),
        DOUBLING.format("[ns.x, ns.x]") + "{{ ns.x | tojson }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ 'x\n' | indent(width=10 ** 9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ {'a': 1} | tojson(indent=10 ** 9) }}",
    ],
)
def test_a_template_cannot_make_huge_values(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_CPU_SECONDS", 0.2)
    with pytest.raises(ChatTemplateError, match=r"in line \d: it (makes|formats|runs)"):
        ChatTemplate(source, {}).render(USER)


def test_bounds_change_no_value() -> None:
    source = (
        "{{ 1 ~ none ~ 'a' ~ [1] }}|{{ ['a', 2] | join(', ') }}"
        "|{{ 'abab' | replace('a', 'é', 1) }}|{{ 'a\nb' | indent }}"
        "|{{ '%s %03d' % ('a', 7) }}|{{ '{:>5}'.format('x') }}|{{ 'a' | center(5) }}|{{ ','.join(['a', 'b']) }}|"
        "{{ [1, 2, 3] | batch(2) | list }}|{{ 'a b c' | truncate(3) }}|{{ messages | map(attribute='role') | join }}|"
        "{% for a in [1, [2, 3]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}"
        "|{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}"
        "|{% for x in [] %}{% else %}e{% endfor %}"
    )
    assert ChatTemplate(source, {}).render(USER) == reference(source, USER)


def test_each_rendering_has_its_own_budget() -> None:
    source = f"{{% for i in range({template_sandbox.MAX_RANGE_ITEMS // 2}) %}}{{% endfor %}}x"
    template = ChatTemplate(source, {})
    assert [template.render(USER) for _ in range(3)] == ["x"] * 3


def test_threads_share_one_template() -> None:
    template = ChatTemplate(chat_templates.GEMMA, SPECIAL_TOKENS)
    conversations = [[{"role": "user", "content": text}] for text in data_files.naughty_strings()]
    expected = [template.render(messages) for messages in conversations]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(template.render, conversations)) == expected


def test_the_date_is_todays() -> None:
    before = time.strftime("%Y-%m-%d")
    rendered = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}).render(USER)
    assert rendered in (before, time.strftime("%Y-%m-%d"))
