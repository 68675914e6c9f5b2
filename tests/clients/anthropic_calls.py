"""Anthropic's own Python client: messages, tools, streams, token counts, errors."""

import json

import anthropic

from tests.clients.calls import CAPITAL, WEATHER_QUESTION, WEATHER_SCHEMA, Call, Target

# The client has no arguments of its own for what the newest hosted models do not take.
GREEDY = {"temperature": 0}
WEATHER_TOOL = {"name": "get_weather", "description": "The weather in a city.", "input_schema": WEATHER_SCHEMA}


def client_of(target: Target) -> anthropic.Anthropic:
    """Nothing is tried twice, and what does not fit the client's types is an error."""
    return anthropic.Anthropic(base_url=target.url, api_key="none", max_retries=0, _strict_response_validation=True)


def _plain_and_streamed(target: Target) -> str:
    request = {"model": target.model, "messages": CAPITAL, "max_tokens": 32, "extra_body": GREEDY}
    with client_of(target) as client:
        plain = client.messages.create(**request)
        with client.messages.stream(**request) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        events = list(client.messages.create(**request, stream=True))
    assert plain.stop_reason == "end_turn"
    assert plain.content[0].text == text == final.content[0].text
    assert final.usage.output_tokens == plain.usage.output_tokens
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
    assert "Paris" in text
    return repr(text)


def _every_field(target: Target) -> None:
    with client_of(target) as client:
        answer = client.messages.create(
            model=target.model,
            system=[{"type": "text", "text": "Be brief."}],
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "Count: one, two,"}]},
                {"role": "assistant", "content": "one, two,"},
                {"role": "user", "content": "Go on."},
            ],
            max_tokens=8,
            metadata={"user_id": "someone"},
            service_tier="auto",
            stop_sequences=["never this"],
            thinking={"type": "disabled"},
            extra_body={"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        )
    assert answer.role == "assistant"
    assert answer.usage.output_tokens <= 8


def _stop_sequence(target: Target) -> None:
    request = {"model": target.model, "messages": CAPITAL, "max_tokens": 32, "extra_body": GREEDY}
    with client_of(target) as client:
        answer = client.messages.create(**request, stop_sequences=["Paris"])
        cut = client.messages.create(**{**request, "max_tokens": 2})
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in answer.content[0].text
    assert cut.stop_reason == "max_tokens"


def _tool_use(target: Target) -> str:
    request = {
        "model": target.model,
        "messages": WEATHER_QUESTION,
        "max_tokens": 80,
        "extra_body": GREEDY,
        "tools": [WEATHER_TOOL],
    }
    with client_of(target) as client:
        for kind in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
            choice = {**kind, "disable_parallel_tool_use": True}
            plain = client.messages.create(**request, tool_choice=choice)
            [use] = [block for block in plain.content if block.type == "tool_use"]
            assert plain.stop_reason == "tool_use"
            assert set(use.input) == {"city", "unit"}
            with client.messages.stream(**request, tool_choice=choice) as stream:
                pieces = [event.partial_json for event in stream if event.type == "input_json"]
                final = stream.get_final_message()
            assert json.loads("".join(pieces)) == use.input
            assert [block.input for block in final.content if block.type == "tool_use"] == [use.input]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "It rains."}
        history = [
            *WEATHER_QUESTION,
            {"role": "assistant", "content": [use.model_dump()]},
            {"role": "user", "content": [result]},
        ]
        answer = client.messages.create(
            model=target.model, messages=history, max_tokens=16, tools=[WEATHER_TOOL], extra_body=GREEDY
        )
    assert answer.content
    return json.dumps(use.input)


def _count_tokens(target: Target) -> str:
    with client_of(target) as client:
        counted = client.messages.count_tokens(model=target.model, messages=CAPITAL)
        answer = client.messages.create(model=target.model, messages=CAPITAL, max_tokens=1)
    # As Anthropic counts them: what is read from the cache stands apart.
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    return f"{counted.input_tokens} tokens"


def _errors(target: Target) -> None:
    request = {"model": target.model, "messages": CAPITAL, "max_tokens": 4}
    with client_of(target) as client:
        for change in ({"temperature": -1}, {"messages": []}, {"max_tokens": -1}):
            try:
                client.messages.create(**request, extra_body=change)
            except anthropic.BadRequestError as error:
                assert error.body["type"] == "error", error.body
                assert error.body["error"]["type"] == "invalid_request_error", error.body
                assert next(iter(change)) in error.body["error"]["message"], error.body
                assert error.request_id
            else:
                raise AssertionError(f"{change} was taken")
        try:
            client.messages.create(**{**request, "model": "other"})
        except anthropic.NotFoundError as error:
            assert error.body["error"]["type"] == "not_found_error"
        else:
            raise AssertionError("another model was taken")


CALLS = (
    Call("messages, plain, streamed and by the helper", _plain_and_streamed),
    Call("messages with every field", _every_field),
    Call("stop_sequences and max_tokens", _stop_sequence),
    Call("tool_choice any and tool, result goes back", _tool_use),
    Call("count_tokens is what is used", _count_tokens),
    Call("errors name the field", _errors),
)
