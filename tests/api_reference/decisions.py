"""What becomes of each field of OpenAI's description, by schema. Plain data; the tests hold it to the server.

A place ends with `*` where the verdict is for everything in it too; the longest place that fits a field decides.
"""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["honoured", "no effect", "refused", "given", "absent"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a field."""

    verdict: Verdict
    note: str = ""
    probe: object = "x"  # a value that is refused


def honoured(note: str = "") -> Decision:
    """It does what OpenAI's description says; the note tells limits."""
    return Decision("honoured", note)


def without_effect(note: str = "") -> Decision:
    """It is checked and changes no answer, nor would it have to."""
    return Decision("no effect", note)


def refused(note: str = "", probe: object = "x") -> Decision:
    """400, and `param` names it."""
    return Decision("refused", note, probe)


def given(note: str = "") -> Decision:
    """The answers have it."""
    return Decision("given", note)


def absent(note: str = "") -> Decision:
    """No answer has it."""
    return Decision("absent", note)


HINT = "a hint for hosted caches"
LABEL = "a label"
NO_MEDIA = "text only"
HOSTED = "a service of OpenAI's"
MODERATION = "there is no moderation"

_PENALTIES = {
    "frequency_penalty": honoured("-2 to 2, over generated tokens"),
    "presence_penalty": honoured("-2 to 2, over generated tokens"),
    "logit_bias": honoured("at most 1024 token ids of the vocabulary, -100 to 100"),
}
SAMPLING = {
    "temperature": honoured("0 to 2; 0 is greedy"),
    "top_p": honoured("0 to 1"),
}
_GENERATION = {
    **_PENALTIES,
    **SAMPLING,
    "model": honoured("a served name; may be left out"),
    "max_tokens": honoured("prompt and answer together must fit the window: 400 otherwise, nothing is cut"),
    "n": honoured("1 to 128"),
    "seed": honoured("the same seed gives the same tokens, at any load; -1 draws one anew, as its absence does"),
    "stop": honoured("at most 16 strings of 1024 bytes"),
    "stream": honoured(),
    "stream_options": honoured("needs stream"),
    "stream_options.include_usage": honoured(),
    "stream_options.include_obfuscation": honoured("off unless it is asked for"),
    "user": without_effect(LABEL),
}
COMPLETIONS = {
    **_GENERATION,
    "prompt": honoured("a string, strings, token ids, or lists of them; none may be empty; at most 2048 prompts"),
    "best_of": honoured("n to 128, by mean log-probability; not with stream"),
    "echo": honoured("with logprobs and max_tokens 0 it scores the prompt"),
    "logprobs": honoured("0 to 20"),
    "suffix": honoured("where the vocabulary has fill-in-the-middle tokens, else 400"),
}
_USAGE = {
    "usage": given(),
    "usage.*": given(),
    "usage.prompt_tokens_details.text_tokens": absent("all are"),
    "usage.prompt_tokens_details.image_tokens": absent(NO_MEDIA),
    "usage.prompt_tokens_details.cache_write_tokens": absent("caching is not asked for, nor charged"),
    "usage.completion_tokens_details.text_tokens": absent("all are"),
}
COMPLETION_ANSWER = {
    "*": given(),
    **_USAGE,
    "choices[].finish_reason": given("stop or length"),
    "choices[].logprobs": given("with `bytes` besides"),
}
CHAT = {
    **_GENERATION,
    "max_completion_tokens": honoured("the same as max_tokens"),
    "max_tokens": honoured("absent: as many as fit the window"),
    "messages": honoured("1 to 4096, in any order that the model's template takes"),
    "messages[developer]": honoured("the template reads it as system"),
    "messages[developer].*": honoured(),
    "messages[system]": honoured(),
    "messages[system].*": honoured(),
    "messages[user]": honoured(),
    "messages[user].*": honoured(),
    "messages[user].content": honoured("a string, or parts of text"),
    "messages[user].content[image_url]*": refused(NO_MEDIA),
    "messages[user].content[input_audio]*": refused(NO_MEDIA),
    "messages[user].content[file]*": refused(NO_MEDIA),
    "messages[assistant]": honoured(),
    "messages[assistant].*": honoured(),
    "messages[assistant].content[refusal]*": refused("a refusal goes into the text"),
    "messages[assistant].refusal": refused("a refusal goes into the text"),
    "messages[assistant].audio*": refused(NO_MEDIA),
    "messages[assistant].function_call*": refused("the older form of tool_calls"),
    "messages[assistant].tool_calls[custom]*": refused("functions only"),
    "messages[assistant].tool_calls[function].function.arguments": honoured("a JSON object, at most 64 levels deep"),
    "messages[tool]": honoured(),
    "messages[tool].*": honoured(),
    "messages[function]*": refused("the older form of the role tool"),
    "tools": honoured("at most 512"),
    "tools[function]": honoured(),
    "tools[function].*": honoured(),
    "tools[function].function.parameters": honoured("at most 64 levels deep"),
    "tools[function].function.strict": honoured("required and named calls follow the schema either way"),
    "tools[custom]*": refused("functions only"),
    "tool_choice": honoured("none, auto, required"),
    "tool_choice(allowed_tools)": honoured(),
    "tool_choice(allowed_tools).*": honoured(),
    "tool_choice(function)": honoured(),
    "tool_choice(function).*": honoured(),
    "tool_choice(custom)*": refused("functions only"),
    "parallel_tool_calls": honoured("false: one call at most"),
    "function_call*": refused("the older form of tool_choice", {"name": "f"}),
    "functions*": refused("the older form of tools", [{"name": "f"}]),
    "response_format": honoured("compiled to a grammar, so that the answer cannot leave the form"),
    "response_format(text)*": honoured(),
    "response_format(json_object)*": honoured(),
    "response_format(json_schema)": honoured("400 names a keyword that cannot be compiled"),
    "response_format(json_schema).*": honoured(),
    "response_format(json_schema).json_schema.strict": honoured("the schema is always followed"),
    "response_format(json_schema).json_schema.description": without_effect("the model does not see it"),
    "response_format(json_schema).json_schema.name": without_effect("the model does not see it"),
    "logprobs": honoured(),
    "top_logprobs": honoured("0 to 20"),
    "reasoning_effort": honoured("goes to the template, where some know it"),
    "service_tier": without_effect("auto or default; others are refused"),
    "modalities": without_effect('["text"]; others are refused'),
    "verbosity": without_effect("medium; others are refused"),
    "store": without_effect("false; true is refused: nothing is stored"),
    "metadata": without_effect(LABEL),
    "safety_identifier": without_effect(LABEL),
    "prompt_cache_key": without_effect(HINT),
    "prompt_cache_retention": without_effect(HINT),
    "prompt_cache_options*": refused(HINT, {"ttl": "30m"}),
    "audio*": refused(NO_MEDIA, {"voice": "alloy", "format": "wav"}),
    "prediction*": refused("there is no speculation by the caller", {"type": "content", "content": "x"}),
    "web_search_options*": refused(HOSTED, {}),
    "moderation*": refused(MODERATION, {"model": "omni-moderation-latest"}),
    "messages[developer].content[].prompt_cache_breakpoint*": without_effect(HINT),
    "messages[system].content[].prompt_cache_breakpoint*": without_effect(HINT),
    "messages[user].content[text].prompt_cache_breakpoint*": without_effect(HINT),
    "messages[assistant].content[text].prompt_cache_breakpoint*": without_effect(HINT),
    "messages[tool].content[].prompt_cache_breakpoint*": without_effect(HINT),
}
_CHAT_CONTENT = "a cut call is no part of it where tool_choice made the answer call, or where calls stand before it"
_CHAT_ANSWER = {
    "*": given(),
    **_USAGE,
    "choices[].finish_reason": given("stop, length or tool_calls: the last only if all arguments are JSON objects"),
    "choices[].logprobs.refusal": given("null: a refusal is text here"),
    "choices[].logprobs.refusal[]*": absent("a refusal is text here"),
    "service_tier": absent("there is one"),
    "moderation*": absent(MODERATION),
}
CHAT_ANSWER = {
    **_CHAT_ANSWER,
    "choices[].message.content": given(_CHAT_CONTENT),
    "choices[].message.refusal": given("null: a refusal is text here"),
    "choices[].message.tool_calls[custom]*": absent("functions only"),
    "choices[].message.annotations*": absent(HOSTED),
    "choices[].message.function_call*": absent("the older form of tool_calls"),
    "choices[].message.audio*": absent(NO_MEDIA),
    "metadata": absent("nothing is stored"),
}
CHAT_CHUNK = {
    **_CHAT_ANSWER,
    "choices[].delta.content": given(_CHAT_CONTENT),
    "choices[].delta.function_call*": absent("the older form of tool_calls"),
    "choices[].delta.refusal": absent("a refusal is text here"),
    "obfuscation": given("where it is asked for"),
}
MODELS = {"*": given(), "data[].shutdown_date": absent("models are not retired here")}
EMBEDDINGS = {
    "input": honoured("a string, strings, token ids, or lists of them; none may be empty"),
    "model": honoured("a served name; may be left out"),
    "encoding_format": honoured("float or base64"),
    "dimensions": honoured("the model's own number; others are refused: it was not trained to be cut"),
    "user": without_effect(LABEL),
}
EMBEDDING_ANSWER = {"*": given()}
