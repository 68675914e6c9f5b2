"""Calls of functions by the real model, which knows no tools: its answers are held to them by a grammar."""

import json

import jsonschema
import openai
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.data_files import function_calls
from tests.end_to_end.server_process import ServerProcess

MAX_TOKENS = 60


def test_required_calls_satisfy_their_schemas_streamed_or_whole(smollm2: ServerProcess):
    client = openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none", max_retries=0)
    for row in function_calls()[:1]:
        wanted = {
            "model": "smollm2",
            "messages": row["messages"],
            "tools": row["tools"],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        }
        choice = client.chat.completions.create(**wanted).choices[0]
        (call,) = choice.message.tool_calls
        parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in row["tools"]}
        assert call.function.name in parameters
        assert choice.message.content is None
        if choice.finish_reason == "tool_calls":
            jsonschema.validate(json.loads(call.function.arguments), parameters[call.function.name])
        else:
            assert choice.finish_reason == "length"
        state = ChatCompletionStreamState()
        for chunk in client.chat.completions.create(**wanted, stream=True):
            state.handle_chunk(chunk)
        streamed = state.current_completion_snapshot.choices[0]
        (again,) = streamed.message.tool_calls
        assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)
        assert streamed.finish_reason == choice.finish_reason
