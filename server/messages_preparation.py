"""From the body of `/v1/messages` to what the engine takes: as the chat that says the same.

Takes a while: runs off the event loop, for a large body in another process (see server/preparer.py). Knows no HTTP and
no engine.
"""

import json
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
from server.errors import InvalidRequest
from server.preparation import PreparedRequest
from server.protocol.fields import parse_body
from server.protocol.messages_api import (
    ContentBlock,
    ConversationFields,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    TextBlock,
)
from server.served_model import ServedModel

# Fields of chats, in the words of this API.
_NAMES = {
    "function.parameters": "input_schema",
    "arguments": "input",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}


@dataclass(frozen=True, slots=True)
class PreparedMessage(PreparedRequest):
    """A request for a message."""

    wanted_tokens: int = field(kw_only=True)  # max_tokens as it was asked for, which may lie past the window


def prepare_message(body: bytes, model: ServedModel) -> PreparedMessage:
    """Read the body of `/v1/messages`. Raises ApiError for what is wrong with it."""
    request = parse_body(MessagesRequest, body)
    translation = _translate(request)
    translation.fields |= {
        "stop": request.stop_sequences or None,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_k": request.top_k,
        "top_p": request.top_p,
    }
    # max_tokens is a bound here: an answer that the window ends before it says so.
    prepared = translation.prepare(model, request.ignored_fields(), max_tokens=request.max_tokens)
    return PreparedMessage(**fields_of(prepared), wanted_tokens=request.max_tokens)


def count_message_tokens(body: bytes, model: ServedModel) -> CountedPrompt:
    """How many tokens the prompt of a message has. Raises ApiError for what is wrong with the body."""
    request = parse_body(CountTokensRequest, body)
    return _translate(request).count(model, request.ignored_fields())


def _translate(request: ConversationFields) -> ChatTranslation:
    """What makes the prompt."""
    translation = ChatTranslation(_NAMES, {"model": request.model, **request.borrowed_fields(), **_tools(request)})
    if request.output_config is not None and request.output_config.format is not None:
        schema = {"name": "answer", "schema": request.output_config.format.json_schema, "strict": True}
        translation.fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if request.system:
        translation.add("system", {"role": "system", "content": text_content([block.text for block in request.system])})
    for turn in _turns(request.messages):
        if turn.role == "assistant":
            _add_assistant_turn(translation, turn)
        else:
            _add_turn(translation, turn)
    _continue_last_message(translation)
    return translation


@dataclass(frozen=True, slots=True)
class _Turn:
    """Messages of one speaker in a row."""

    path: str  # of the first
    role: str
    blocks: list[tuple[str, ContentBlock]]  # with their paths


def _turns(messages: list[InputMessage]) -> list[_Turn]:
    turns: list[_Turn] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if not turns or turns[-1].role != message.role:
            turns.append(_Turn(path, message.role, []))
        turns[-1].blocks.extend((f"{path}.content[{place}]", block) for place, block in enumerate(message.content))
    return turns


def _add_turn(translation: ChatTranslation, turn: _Turn) -> None:
    """What the user or the system says. What a tool answered is a message of its own."""
    texts: list[str] = []
    for path, block in turn.blocks:
        if block.type == "text":
            texts.append(block.text or "")
            continue
        if texts:
            translation.add(turn.path, {"role": turn.role, "content": text_content(texts)})
            texts = []
        content = _tool_result(block.content, block.is_error)
        translation.add(path, {"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    if texts or not turn.blocks:
        translation.add(turn.path, {"role": turn.role, "content": text_content(texts or [""])})


def _add_assistant_turn(translation: ChatTranslation, turn: _Turn) -> None:
    texts = [block.text or "" for _, block in turn.blocks if block.type == "text"]
    calls = [(path, block) for path, block in turn.blocks if block.type == "tool_use"]
    for path, block in turn.blocks[len(texts) :]:
        if block.type == "text":
            raise InvalidRequest(f"{path} is text after a tool_use, which the model's conversations cannot have.", path)
    content = text_content(texts or [""]) if texts or not calls else None
    translation.add(turn.path, {"role": "assistant", "content": content})
    for path, block in calls:
        translation.add_call(path, block.id, block.name, json.dumps(block.input, ensure_ascii=False))


def _continue_last_message(translation: ChatTranslation) -> None:
    """What the assistant has begun to say, it goes on to say. Raises InvalidRequest where it has called a tool."""
    last, path = translation.messages[-1], translation.origins[-1]
    if last["role"] != "assistant":
        return
    if "tool_calls" in last:
        raise InvalidRequest(f"{path} has a tool_use that no tool_result follows.", path)
    if not last["content"]:
        raise InvalidRequest(f"{path}.content must not be empty, for the answer goes on from it.", f"{path}.content")
    translation.fields |= {"continue_final_message": True, "add_generation_prompt": False}


def _tool_result(content: list[TextBlock] | None, is_error: bool | None) -> str | list[dict[str, str]]:
    """What a tool answered. Chats have no mark for an error, so the text says it."""
    texts = [block.text for block in content or []] or [""]
    return text_content([f"Error: {texts[0]}", *texts[1:]] if is_error else texts)


def _tools(request: ConversationFields) -> dict[str, Any]:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls` of a chat."""
    tools = [function_tool(tool.name, tool.description, tool.input_schema, tool.strict) for tool in request.tools or []]
    choice = request.tool_choice
    if choice is None or (not tools and choice.type in ("auto", "none")):
        return {"tools": tools or None}
    if choice.type == "tool":
        chosen: Any = chosen_function(choice.name)
    else:
        chosen = {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    return {"tools": tools, "tool_choice": chosen, "parallel_tool_calls": not choice.disable_parallel_tool_use}
