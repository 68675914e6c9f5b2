"""Renders a conversation with the model's own chat template, in a sandbox with bounds on what it may produce.

The template comes with the model, never from a request. Behaves as transformers' `apply_chat_template` does; knows no
tokens: the caller encodes the text without adding special tokens, for the template writes them itself.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta, nodes

from server.template_sandbox import SANDBOX, compile_template, render_template, reserved_names

_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)


class ChatTemplateError(Exception):
    """The template is broken, or refused the conversation. The message gives its line and its reason."""


class ChatTemplate:
    """One model's chat template, compiled once. Threads may share it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        """Compile `source`, and `tool_source` for conversations with tools where the model has a separate one.

        `special_tokens` are the names and texts that the template may use, such as `bos_token`. A template that does
        not compile raises only when it is rendered: its model still serves completions.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._default = _CompiledTemplate(source)
        self._for_tools = _CompiledTemplate(tool_source) if tool_source is not None else self._default

    def takes(self, variable: str) -> bool:
        """Whether the template looks at a variable."""
        return variable in self._default.variables or variable in self._for_tools.variables

    def reserves(self, variable: str) -> bool:
        """Whether a variable has a meaning of its own, and must not be set."""
        return variable in _VARIABLES or variable in self._special_tokens or variable in reserved_names()

    @property
    def tool_source(self) -> str:
        """The text of the template for conversations with tools."""
        return self._for_tools.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,  # noqa: ANN401 - whatever variables the template knows
    ) -> str:
        """The prompt for `messages`: objects with `role` and `content`, a string or a list of text parts.

        Text parts reach a template that iterates over content as they are; for others they are joined by newlines.
        With `continue_final_message` the prompt ends where the last message's text ends. `extra` are further variables
        for the template, none that it `reserves`. Raises ChatTemplateError.
        """
        mark = f"{secrets.token_hex(16)} "  # the template may trim the space, as it would trim the text's own
        if continue_final_message:
            messages = [*messages[:-1], _with_text(messages[-1], mark)]
        template = self._for_tools if tools else self._default
        variables: dict[str, Any] = {"messages": messages, "tools": tools, "documents": documents}
        variables |= {"add_generation_prompt": add_generation_prompt, **self._special_tokens}
        reserved = next(filter(self.reserves, sorted(extra)), None)
        if reserved is not None:
            raise ChatTemplateError(f"{reserved} has a meaning in chat templates already and cannot be set.")
        text = template.render(variables | extra)
        return _up_to(text, mark) if continue_final_message else text


class _CompiledTemplate:
    """A template, or the reason why it does not compile; and the form of content that it wants."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._template: jinja2.Template | None = None
        self._problem = ""
        self.variables: frozenset[str] = frozenset()
        try:
            syntax_tree = SANDBOX.parse(source)
            self._template = compile_template(source)
        except jinja2.TemplateSyntaxError as error:
            self._problem = f"line {error.lineno}: {error.message}"
            return
        except Exception as error:  # too deep or too large for the compiler
            self._problem = f"{type(error).__name__}: {error}"
            return
        self.variables = frozenset(meta.find_undeclared_variables(syntax_tree))
        self._takes_parts = _iterates_over_content(syntax_tree)
        self._takes_strings = not self._takes_parts or _asks_for_string(syntax_tree)

    def render(self, variables: dict[str, Any]) -> str:
        if self._template is None:
            raise ChatTemplateError(f"The model's chat template does not compile ({self._problem}).")
        variables["messages"] = [self._with_content(message) for message in variables["messages"]]
        try:
            return render_template(self._template, variables)
        except Exception as error:  # a template can raise anything that an expression can
            reason = str(error) or type(error).__name__
            raise ChatTemplateError(f"The model's chat template failed{_line_of(error)}: {reason}") from error

    def _with_content(self, message: Mapping[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, str) and not self._takes_strings:
            content = [{"type": "text", "text": content}]
        elif isinstance(content, list) and not self._takes_parts:
            content = "\n".join(_part_text(part) for part in content)
        else:
            return dict(message)
        return dict(message) | {"content": content}


def _with_text(message: Mapping[str, Any], addition: str) -> dict[str, Any]:
    """The message with something added to the end of its text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + addition}
    parts = list(content or ())
    if not parts:
        raise ChatTemplateError("There is no text in the final message that could be continued.")
    return {**message, "content": [*parts[:-1], {"type": "text", "text": _part_text(parts[-1]) + addition}]}


def _up_to(text: str, mark: str) -> str:
    """What stands before the mark; where the template trims spaces, without those before it."""
    position = text.rfind(mark.strip())
    if position < 0:
        raise ChatTemplateError("The model's chat template does not write the final message, so nothing can follow it.")
    return text[:position] if text.startswith(mark, position) else text[:position].rstrip()


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ChatTemplateError("The model's chat template takes text only; a message holds a part that is not text.")


def _line_of(error: BaseException) -> str:
    """Where in the template an error arose: Jinja names its frames `<template>` and gives them template lines."""
    line = None
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f" in line {line}" if line is not None else ""


# What a template wants as content, read off its syntax tree: some loop over parts, some take a string, some ask which
# it is. A wrong guess costs little: text still arrives, as a part or joined.


def _iterates_over_content(tree: nodes.Template) -> bool:
    names = {"content"}  # macros take it under its own name
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(expression: nodes.Node, names: set[str]) -> bool:
    """Whether an expression is a message's content, perhaps through filters or a slice."""
    while isinstance(expression, nodes.Filter) and expression.node is not None:
        expression = expression.node
    if isinstance(expression, nodes.Name):
        return expression.name in names
    if isinstance(expression, nodes.Getattr):
        return expression.attr == "content"
    if isinstance(expression, nodes.Getitem):
        key = expression.arg
        return (isinstance(key, nodes.Const) and key.value == "content") or (
            isinstance(key, nodes.Slice) and _is_content(expression.node, names)
        )
    return False


def _asks_for_string(tree: nodes.Template) -> bool:
    return any(test.name in ("string", "iterable", "sequence", "mapping") for test in tree.find_all(nodes.Test))
