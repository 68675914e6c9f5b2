"""Tells a model of functions whose chat template knows none: as text, in the form of Hermes, which many models know.

The functions stand in the system message, calls in the assistant's messages, results in the user's. Knows no API and
no template.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = """\
You can call functions. These are the functions, as JSON:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments in this form, once for each call:
<tool_call>
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
</tool_call>"""


def with_tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The same conversation for a template that knows neither tools nor their calls and results."""
    written = [_without_calls(message) for message in messages]
    if tools:
        described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        introduction = _INTRODUCTION.format(tools=described)
        if written[0]["role"] == "system":
            system = written.pop(0)
            introduction = f"{_text(system['content'])}\n\n{introduction}"
        written.insert(0, {"role": "system", "content": introduction})
    return _merged(written)


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        return {"role": "tool", "content": f"<tool_response>\n{_text(message['content'])}\n</tool_response>"}
    calls = [_call_text(call["function"]) for call in message.get("tool_calls", ())]
    if calls:
        content = _text(message["content"])
        plain["content"] = "\n".join([content, *calls] if content else calls)
    return plain


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results are the user's words; with what he says next they are one turn, for many templates want turns in turn."""
    merged: list[dict[str, Any]] = []
    is_after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_after_result and message["role"] in ("tool", "user"):
            content = f"{merged[-1]['content']}\n{_text(message['content'])}"
            merged[-1] = {**message, "role": "user", "content": content}
        else:
            merged.append({**message, "role": "user"} if is_result else message)
        is_after_result = is_result
    return merged


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
