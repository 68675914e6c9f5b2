"""From the body of `/v1/messages` to what the engine takes: as the chat that says the same.

Takes a while: runs in a thread, off the event loop. Knows no HTTP and no engine.
"""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from server.chat_preparation import conversation_tokens, prepare_conversation
from server.chat_translation import ChatTranslation, CountedPrompt, fields_of, function_tool, text_content
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
    with translation.naming():
        prepared = prepare_conversation(translation.chat_request(), model)
    # max_tokens is a bound here: an answer that the window ends before it says so.
    (prompt,) = prepared.prompts
    params = replace(prompt.params, max_tokens=min(request.max_tokens, prompt.params.max_tokens))
    changed = {"prompts": (replace(prompt, params=params),), "ignored_fields": tuple(request.ignored_fields())}
    return PreparedMessage(**(fields_of(prepared) | changed), wanted_tokens=request.max_tokens)


def count_message_tokens(body: bytes, model: ServedModel) -> CountedPrompt:
    """How many tokens the prompt of a message has. Raises ApiError for what is wrong with the body."""
    request = parse_body(CountTokensRequest, body)
    model.check_name(request.model)
    translation = _translate(request)
    with translation.naming():
        num_tokens = len(conversation_tokens(translation.chat_request(), model))
    return CountedPrompt(num_tokens, tuple(request.ignored_fields()))


def _translate(request: ConversationFields) -> ChatTranslation:
    """What makes the prompt."""
    translation = ChatTranslation(_NAMES, {"model": request.model, **request.borrowed_fields(), **_tools(request)})
    if request.output_config is not None and request.output_config.format is not None:
        schema = {"name": "answer", "schema": request.output_config.format.json_schema, "strict": True}
        translation.fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if request.system:
        translation.add("system", {"role": "system", "content": text_content([block.text for block in request.system])})
    for path, role, blocks in _turns(request.messages):
        for message in _chat_messages(path, role, blocks):
            translation.add(path, message)
    last = translation.messages[-1]
    if last["role"] == "assistant":
        if "tool_calls" in last:
            raise InvalidRequest("messages ends with a tool_use that has no tool_result.", "messages")
        # The answer goes on from what the assistant has said already.
        translation.fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return translation


def _turns(messages: list[InputMessage]) -> list[tuple[str, str, list[ContentBlock]]]:
    """Path, role and content of each turn: messages of one speaker in a row are one."""
    turns: list[tuple[str, str, list[ContentBlock]]] = []
    for index, message in enumerate(messages):
        if turns and turns[-1][1] == message.role:
            turns[-1][2].extend(message.content)
        else:
            turns.append((f"messages[{index}]", message.role, list(message.content)))
    return turns


def _chat_messages(path: str, role: str, blocks: list[ContentBlock]) -> list[dict[str, Any]]:
    """One turn as messages of a chat, where what a tool answered is a message of its own."""
    if role == "assistant":
        return [_assistant_message(path, blocks)]
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for block in blocks:
        if block.type == "text":
            texts.append(block.text or "")
            continue
        if texts:
            messages.append({"role": role, "content": text_content(texts)})
            texts = []
        messages.append(
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": _tool_result(block.content, block.is_error)}
        )
    if texts or not messages:
        messages.append({"role": role, "content": text_content(texts or [""])})
    return messages


def _assistant_message(path: str, blocks: list[ContentBlock]) -> dict[str, Any]:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        if block.type == "tool_use":
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif calls:
            raise InvalidRequest(
                f"{path}.content has text after a tool_use, which chats cannot say.", f"{path}.content"
            )
        else:
            texts.append(block.text or "")
    content = text_content(texts or [""]) if texts or not calls else None
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


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
        chosen: Any = {"type": "function", "function": {"name": choice.name}}
    else:
        chosen = {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    return {"tools": tools, "tool_choice": chosen, "parallel_tool_calls": not choice.disable_parallel_tool_use}
