"""litellm, as a client of a server that speaks OpenAI's API, vLLM's extensions of it, or Anthropic's."""

import json

import litellm

from tests.clients.calls import CAPITAL, WEATHER_QUESTION, WEATHER_SCHEMA, Call, Target

WEATHER_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER_SCHEMA}}


litellm.suppress_debug_info = True


def _options(target: Target, provider: str = "openai") -> dict[str, object]:
    base = target.url if provider == "anthropic" else f"{target.url}/v1"
    return {"model": f"{provider}/{target.model}", "api_base": base, "api_key": "none", "num_retries": 0}


def _chat(provider: str, target: Target) -> str:
    request = {**_options(target, provider), "messages": CAPITAL, "max_tokens": 32, "temperature": 0}
    plain = litellm.completion(**request)
    chunks = list(litellm.completion(**request, stream=True))
    content = plain.choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content
    assert "Paris" in content
    assert plain.usage.completion_tokens > 0
    return repr(content)


def _text(target: Target) -> str:
    request = {**_options(target, "text-completion-openai"), "prompt": "The capital of France is", "max_tokens": 8}
    answer = litellm.text_completion(**request, temperature=0)
    assert "Paris" in answer.choices[0].text
    return repr(answer.choices[0].text)


def _tools(provider: str, target: Target) -> str:
    answer = litellm.completion(
        **_options(target, provider),
        messages=WEATHER_QUESTION,
        tools=[WEATHER_TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
        temperature=0,
    )
    [call] = answer.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    return call.function.arguments


def _extensions(target: Target) -> str:
    answer = litellm.completion(
        **_options(target, "hosted_vllm"),
        messages=CAPITAL,
        max_tokens=8,
        temperature=0,
        top_k=5,
        guided_choice=["Paris", "Rome"],
    )
    assert answer.choices[0].message.content in ("Paris", "Rome")
    return repr(answer.choices[0].message.content)


def _embedding(target: Target) -> None:
    answer = litellm.embedding(**_options(target), input=["one", "two"], encoding_format="float")
    assert [entry["index"] for entry in answer.data] == [0, 1]


def _responses(target: Target) -> None:
    answer = litellm.responses(**_options(target), input=CAPITAL[0]["content"], max_output_tokens=16)
    assert answer.output[0].content[0].text


def _errors(target: Target) -> None:
    try:
        litellm.completion(**_options(target), messages=CAPITAL, max_tokens=10**6)
    except litellm.ContextWindowExceededError:
        return
    except litellm.BadRequestError as error:
        assert "max_tokens" in str(error)
        return
    raise AssertionError("more than a window was taken")


CALLS = (
    Call("openai/ chat, plain and streamed", lambda target: _chat("openai", target)),
    Call("hosted_vllm/ chat, plain and streamed", lambda target: _chat("hosted_vllm", target)),
    Call("anthropic/ chat, plain and streamed", lambda target: _chat("anthropic", target)),
    Call("text_completion", _text),
    Call("openai/ tools", lambda target: _tools("openai", target)),
    Call("anthropic/ tools", lambda target: _tools("anthropic", target)),
    Call("hosted_vllm/ guided_choice and top_k", _extensions),
    Call("embedding", _embedding),
    Call("responses", _responses),
    Call("errors have their class", _errors),
)
