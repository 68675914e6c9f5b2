"""Valid bodies of every POST route, small and with all that the route may take, for tests that bend them."""

from typing import Any

_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "get_weather", "description": "The weather in a city.", "parameters": _SCHEMA}
_RESPONSES_FUNCTION = {"type": "function", **_FUNCTION, "strict": True}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}

SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "n": 2,
    "stop": ["xyz"],
    "stop_token_ids": [7],
    "ignore_eos": False,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"65": -3.5},
    "min_tokens": 1,
    "bad_words": ["never"],
    "allowed_token_ids": [65, 66, 67],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": 32,
    "priority": 3,
    "return_token_ids": True,
}

_CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather in Oslo?"}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "user", "content": "And now?", "name": "ann"},
]
_MESSAGES_TOOL = {"name": "get_weather", "description": "The weather.", "input_schema": _SCHEMA}
_MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "Weather in Oslo?"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}]},
]
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Weather in Oslo?"}]},
    {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    {"type": "message", "role": "user", "content": "And now?"},
]
_FORMAT = {"name": "weather", "description": "What it is like.", "schema": _SCHEMA, "strict": True}
_RESPONSES_FORMAT = {"type": "json_schema", **_FORMAT}

_BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}
_TEXT_PARTS = [{"type": "text", "text": "Be brief.", **_BREAKPOINT}]
_LABELS = {"user": "ann", "safety_identifier": "ann", "prompt_cache_key": "k", "prompt_cache_retention": "24h"}
_ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
_SCORED = {"token": "a", "logprob": -0.5, "bytes": [97]}
_INPUT_PARTS = [{"type": "input_text", "text": "Oslo?", **_BREAKPOINT}]
_OUTPUT_PARTS = [
    {"type": "output_text", "text": "a", "annotations": [], "logprobs": [{**_SCORED, "top_logprobs": [_SCORED]}]},
    {"type": "refusal", "refusal": "No."},
]
_OF_ITEM = {"id": "item_1", "status": "completed"}
_OF_CALL = {**_OF_ITEM, "call_id": "call_1", "name": "get_weather", "caller": {"type": "direct"}}
# As answers are sent back, with all that OpenAI's clients leave in them.
_WIDE_ITEMS = [
    {"type": "message", "role": "user", "content": _INPUT_PARTS, "phase": None, **_OF_ITEM},
    {"type": "function_call", "arguments": "{}", **_OF_CALL},
    {"type": "function_call_output", "output": _INPUT_PARTS, **_OF_CALL},
    {"type": "message", "role": "assistant", "content": _OUTPUT_PARTS, "phase": "final_answer", **_OF_ITEM},
]
_WIDE_TOOL = {**_RESPONSES_FUNCTION, "defer_loading": False, "allowed_callers": ["direct"]}

# The first of each route is as small as its answer may be; the others reach into everything that it takes.
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "Hello", "max_tokens": 3},
        {"prompt": ["Hello", "Good day"], "max_tokens": 3, "logprobs": 2, "echo": True, "prompt_logprobs": 1},
        {"prompt": [72, 101], "max_tokens": 3, **SAMPLING, "best_of": 3},
        {"prompt": "a", "max_tokens": 3, "n": 2, "best_of": 3, "use_beam_search": True, "length_penalty": 1.0},
        {"prompt": "a", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "a", "max_tokens": 3, "structured_outputs": {"regex": "[a-z]+"}},
        {
            "model": "byte-model",
            "prompt": "a",
            "max_tokens": 3,
            "stream": True,
            "stream_options": {"include_obfuscation": True, "continuous_usage_stats": True},
            **_LABELS,
        },
    ],
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3},
        {"messages": _CONVERSATION, "max_completion_tokens": 3, **SAMPLING, "logprobs": True, "top_logprobs": 2},
        {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 3,
            "tools": [{"type": "function", "function": _FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
            "parallel_tool_calls": False,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 3,
            "response_format": {"type": "json_schema", "json_schema": _FORMAT},
            "chat_template_kwargs": {},
        },
        {
            "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good"}],
            "max_tokens": 3,
            "add_generation_prompt": False,
            "continue_final_message": True,
            "response_format": {"type": "text"},
        },
        {
            "model": "byte-model",
            "messages": [
                {"role": "developer", "content": _TEXT_PARTS, "name": "dev"},
                {"role": "system", "content": _TEXT_PARTS, "name": "sys"},
                {"role": "user", "content": _TEXT_PARTS},
                {"role": "assistant", "content": _TEXT_PARTS, "name": "bot", "tool_calls": [_CALL]},
                {"role": "tool", "content": _TEXT_PARTS, "tool_call_id": "call_1"},
            ],
            "max_tokens": 3,
            "tools": [{"type": "function", "function": {**_FUNCTION, "strict": True}}],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": _ALLOWED},
            "metadata": {"a": "b"},
            "modalities": ["text"],
            "reasoning_effort": "none",
            "service_tier": "auto",
            "store": False,
            "verbosity": "medium",
            "stream": True,
            "stream_options": {"include_obfuscation": True},
            **_LABELS,
        },
        {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 3,
            "response_format": {"type": "json_object"},
        },
    ],
    "/v1/embeddings": [
        {"input": "Hello"},
        {
            "model": "byte-model",
            "input": ["Hello", "Good day"],
            "encoding_format": "base64",
            "dimensions": 4,
            "pooling": "mean",
        },
        {"input": [[72, 101], [108]], "encoding_format": "float", "user": "ann"},
    ],
    "/tokenize": [
        {"prompt": "Hello"},
        {"prompt": "Hello", "add_special_tokens": False, "return_token_strs": True},
        {"messages": _CONVERSATION[:2], "add_generation_prompt": True, "chat_template_kwargs": {}},
        {"content": "Hello", "add_special": True, "with_pieces": True},
    ],
    "/detokenize": [{"tokens": [72, 101]}],
    "/v1/responses": [
        {"input": "Hello", "max_output_tokens": 3, "store": False},
        {
            "input": _ITEMS,
            "instructions": "Be brief.",
            "max_output_tokens": 3,
            "store": False,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"},
            "truncation": "disabled",
            "tools": [_RESPONSES_FUNCTION],
            "tool_choice": {"type": "function", "name": "get_weather"},
            "parallel_tool_calls": False,
            "reasoning": {"effort": "none"},
            "stream": True,
        },
        {"input": "Hello", "max_output_tokens": 3, "store": False, "text": {"format": _RESPONSES_FORMAT}},
        {"input": "Hello", "max_output_tokens": 3, "text": {"format": {"type": "json_object"}, "verbosity": "medium"}},
        {
            "model": "byte-model",
            "input": _WIDE_ITEMS,
            "max_output_tokens": 3,
            "max_tool_calls": 3,
            "background": False,
            "service_tier": "auto",
            "text": {"format": {"type": "text"}},
            "reasoning": {
                "effort": "none",
                "mode": "standard",
                "summary": "auto",
                "generate_summary": "auto",
                "context": "auto",
            },
            "tools": [_WIDE_TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "get_weather"}],
            },
            "stream": True,
            "stream_options": {"include_obfuscation": True},
            **_LABELS,
        },
    ],
    "/v1/responses/input_tokens": [
        {"input": "Hello"},
        {
            "model": "byte-model",
            "input": _ITEMS,
            "instructions": "Be brief.",
            "tools": [_RESPONSES_FUNCTION],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "none"},
            "truncation": "disabled",
        },
    ],
    "/v1/messages": [
        {"model": "byte-model", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3},
        {
            "model": "byte-model",
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": _MESSAGES,
            "max_tokens": 3,
            "stop_sequences": ["xyz"],
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "metadata": {"user_id": "ann"},
            "tools": [_MESSAGES_TOOL],
            "tool_choice": {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
            "stream": True,
        },
    ],
    "/v1/messages/count_tokens": [
        {"model": "byte-model", "messages": [{"role": "user", "content": "Hello"}]},
        {"model": "byte-model", "system": "Be brief.", "messages": _MESSAGES, "tools": [_MESSAGES_TOOL]},
    ],
}
