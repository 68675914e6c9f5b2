"""What a chat's tools mean for one model: what its template is told, how answers are read, what they may hold.

Knows no HTTP, no template's text and no engine.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.grammar import JSON_WHITESPACE
from scheduler.json_schema import JSON_ESCAPES, SchemaError, grammar_schema
from scheduler.sampling_params import StructuredOutput
from server.errors import InvalidRequest
from server.protocol.chat import ChatCompletionRequest
from server.protocol.structured_outputs import check_size
from server.protocol.tools import Tool
from server.served_model import ServedModel
from server.tool_parsers.answer_form import AnswerForm
from server.tool_parsers.formats import (
    HERMES,
    CallableFunction,
    CallRules,
    ToolCallForm,
    arguments_schema,
    tool_call_form,
)

MAX_GRAMMAR_BYTES = 512 << 10  # of all functions of one request


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one request uses tools."""

    offered: tuple[Tool, ...] = ()  # that the model is told of
    as_text: bool = False  # the template knows no tools: they, their calls and results are written as text
    form: ToolCallForm | None = None  # of the calls of an answer; None: there are none to be read


def tool_use_of(request: ChatCompletionRequest, model: ServedModel) -> ToolUse:
    """Whether and how. Raises InvalidRequest for tools that the model's template writes in an unknown form."""
    template = model.tokenizer.chat_template
    if template is None:
        return ToolUse()
    as_text = not template.takes("tools")
    if request.choice.mode == "none":
        return ToolUse(as_text=as_text)
    form = tool_call_form(template.tool_source, model.tool_call_parser)
    if form is None and as_text:
        form = HERMES
    if form is None:
        raise InvalidRequest(
            f"The chat template of {model.names[0]} writes tool calls in a form that is not known here; "
            "the server's --tool-call-parser may name one.",
            "tools",
        )
    return ToolUse(tuple(request.tools or ()), as_text, form)


def answer_form_of(request: ChatCompletionRequest, use: ToolUse, model: ServedModel) -> AnswerForm:
    """How the answers are to be read."""
    echo = request.final_message if request.echo else None
    if use.form is None:
        return AnswerForm(echo=echo or "")
    names = frozenset(tool.function.name for tool in use.offered)
    return AnswerForm(
        use.form,
        names,
        calls_only=request.choice.mode == "required",
        echo=echo or "",
        shown_token_ids=frozenset(_special_ids(use.form, model).values()),
    )


def structured_output_of_tools(
    request: ChatCompletionRequest, use: ToolUse, model: ServedModel, asked: StructuredOutput | None
) -> StructuredOutput | None:
    """The language of the answers, where `asked` is that of content. Raises InvalidRequest if they exclude each other.

    With tool_choice "auto" the model writes what it wants, unless some rule must hold: a `strict` function, one call at
    most, some functions only, or a form of content.
    """
    if use.form is None:
        return asked
    if asked is not None and asked.kind not in ("json_object", "json_schema"):
        raise InvalidRequest(f'tools need tool_choice "none" beside {asked.param}.', asked.param)
    choice = request.choice
    required = choice.mode == "required"
    parallel = request.parallel_tool_calls is not False and not choice.is_named
    tools = [tool for tool in use.offered if choice.names is None or tool.function.name in choice.names]
    is_strict = any(tool.function.strict for tool in tools)
    if not (required or is_strict or not parallel or choice.names is not None or asked is not None):
        return None
    if asked is not None and not required and use.form.markup.bare:
        raise InvalidRequest(
            f"The model's form of tool calls cannot be told from JSON: {asked.param} and tools exclude each other "
            'unless tool_choice is "none" or "required".',
            asked.param,
        )
    rules = CallRules(
        _callable_functions(tools, use.offered, enforce_all=required),
        required=required,
        parallel=parallel,
        content_schema=None if asked is None or required else _content_schema(asked),
    )
    grammar = use.form.grammar(rules, _special_ids(use.form, model))
    check_size(grammar, MAX_GRAMMAR_BYTES, "tools")
    return StructuredOutput("grammar", grammar, param="tools")


def _callable_functions(
    tools: Sequence[Tool], offered: Sequence[Tool], *, enforce_all: bool
) -> tuple[CallableFunction, ...]:
    """Functions with the schemas to enforce: a model that may choose is held to those of strict functions only."""
    functions = []
    for tool in tools:
        function = tool.function
        parameters = function.parameters
        if parameters is not None and parameters.get("type", "object") != "object":
            path = f"tools[{offered.index(tool)}].function.parameters"
            raise InvalidRequest(f'{path}.type must be "object": arguments have names.', f"{path}.type")
        if not (enforce_all or function.strict):
            parameters = {}
        try:
            arguments_schema(parameters)
        except SchemaError as error:
            path = f"tools[{offered.index(tool)}].function.parameters"
            raise InvalidRequest(f"{path} cannot be followed: {error}.", path) from None
        functions.append(CallableFunction(function.name, parameters))
    return tuple(functions)


def _content_schema(asked: StructuredOutput) -> str:
    """With the whitespace that was asked for. Raises InvalidRequest if no grammar can follow it."""
    schema: Any = json.loads(asked.value) if asked.kind == "json_schema" else {"type": "object"}
    if schema is False:
        raise InvalidRequest(f"{asked.param} cannot be followed: it allows no answer.", asked.param)
    try:
        followed = {} if schema is True else grammar_schema(schema)
    except SchemaError as error:
        raise InvalidRequest(f"{asked.param} cannot be followed: {error}.", asked.param) from None
    pattern = JSON_WHITESPACE if asked.whitespace is None else asked.whitespace
    style = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    return json.dumps({**followed, "x-guidance": {**style, "json_allowed_escapes": JSON_ESCAPES}})


def _special_ids(form: ToolCallForm, model: ServedModel) -> dict[str, int]:
    """The form's marks that are special tokens of the model."""
    tokenizer = model.tokenizer
    ids = ((mark, tokenizer.token_id(mark)) for mark in form.marks)
    return {
        mark: token_id for mark, token_id in ids if token_id is not None and token_id in tokenizer.special_token_ids
    }
