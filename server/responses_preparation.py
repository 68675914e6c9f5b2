"""From the body of `/v1/responses` to what the engine takes: as the chat that says the same.

Takes a while: runs off the event loop, for a large body in another process (see server/preparer.py). Knows no HTTP and
no engine.
"""

from dataclasses import dataclass, field
from typing import Any

from server.chat_translation import (
    ChatTranslation,
    CountedPrompt,
    chosen_function,
    fields_of,
    function_tool,
    text_content,
)
from server.preparation import PreparedRequest
from server.protocol.fields import parse_body
from server.protocol.responses_api import (
    InputFields,
    InputItem,
    InputTokensRequest,
    ResponsesRequest,
    TextFormat,
    ToolChoice,
)
from server.served_model import ServedModel

# Fields of chats, in the words of this API.
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "verbosity": "text.verbosity",
}


@dataclass(frozen=True, slots=True)
class PreparedResponse(PreparedRequest):
    """A request for a response."""

    asked: ResponsesRequest = field(kw_only=True)  # without its input; the response repeats the rest


def prepare_response(body: bytes, model: ServedModel) -> PreparedResponse:
    """Read the body of `/v1/responses`. Raises ApiError for what is wrong with it."""
    request = parse_body(ResponsesRequest, body)
    translation = _translate(request)
    options = request.stream_options
    translation.fields |= {
        "logprobs": request.wants_logprobs or None,
        "max_tokens": request.max_output_tokens,
        "stream": request.stream,
        "stream_options": options and {"include_obfuscation": options.include_obfuscation},
        "temperature": request.temperature,
        "top_logprobs": request.top_logprobs if request.wants_logprobs else None,
        "top_p": request.top_p,
    }
    prepared = translation.prepare(model, request.ignored_fields())
    return PreparedResponse(**fields_of(prepared), asked=request.model_copy(update={"input": []}))


def count_input_tokens(body: bytes, model: ServedModel) -> CountedPrompt:
    """How many tokens the prompt of a response has. Raises ApiError for what is wrong with the body."""
    request = parse_body(InputTokensRequest, body)
    return _translate(request).count(model, request.ignored_fields())


def _translate(request: InputFields) -> ChatTranslation:
    """What makes the prompt, and the form of the answer."""
    translation = ChatTranslation(_NAMES, {"model": request.model, **request.borrowed_fields(), **_tools(request)})
    if request.text is not None:
        translation.fields |= {
            "verbosity": request.text.verbosity,
            "response_format": _response_format(request.text.format),
        }
    if request.reasoning is not None:
        translation.fields["reasoning_effort"] = request.reasoning.effort
    if request.instructions is not None:
        translation.add("instructions", {"role": "system", "content": request.instructions})
    for index, item in enumerate(request.input):
        _add(translation, f"input[{index}]", item)
    return translation


def _add(translation: ChatTranslation, path: str, item: InputItem) -> None:
    """An item as a message of the chat. Functions that are called in a row make one, with what was said before them."""
    if item.type == "function_call":
        if not translation.messages or translation.messages[-1]["role"] != "assistant":
            translation.add(path, {"role": "assistant", "content": None})
        translation.add_call(path, item.call_id, item.name, item.arguments)
    elif item.type == "function_call_output":
        output = text_content([part.said for part in item.output or []] or [""])
        translation.add(path, {"role": "tool", "tool_call_id": item.call_id, "content": output})
    else:
        content = text_content([part.said for part in item.content or []] or [""])
        translation.add(path, {"role": item.role, "content": content})


def _response_format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None or form.type != "json_schema":
        return None if form is None or form.type == "text" else {"type": form.type}
    schema = {"name": form.name, "schema": form.json_schema, "strict": form.strict}
    return {"type": "json_schema", "json_schema": schema}


def _tools(request: InputFields) -> dict[str, Any]:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls` of a chat."""
    return {
        "tools": [function_tool(t.name, t.description, t.parameters, t.strict) for t in request.tools or []] or None,
        "tool_choice": None if request.tool_choice is None else _chat_tool_choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
    }


def _chat_tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "function":
        return chosen_function(choice.name)
    if choice.type != "allowed_tools":
        return choice.type
    allowed = {"mode": choice.mode, "tools": [chosen_function(tool.name) for tool in choice.tools or []]}
    return {"type": "allowed_tools", "allowed_tools": allowed}
