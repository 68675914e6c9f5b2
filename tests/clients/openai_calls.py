"""OpenAI's own Python client: completions, chat, tools, structured output, embeddings, responses, errors."""

import asyncio
import json
import math

import openai
from pydantic import BaseModel

from tests.clients.calls import CAPITAL, WEATHER_QUESTION, WEATHER_SCHEMA, Call, Target
from tests.clients.openai_examples import replay_examples

WEATHER_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": WEATHER_SCHEMA},
}


class Weather(BaseModel):
    """What parsing helpers read."""

    city: str
    degrees: int


def client_of(target: Target, *, strict: bool = True) -> openai.OpenAI:
    """Nothing is tried twice, and with `strict` what does not fit the client's types is an error."""
    return openai.OpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0, _strict_response_validation=strict)


def _plain_and_streamed_completion(target: Target) -> str:
    request = {"model": target.model, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
    with client_of(target) as client:
        plain = client.completions.create(**request)
    # Its type of a chunk is that of a whole answer, with no null for finish_reason; OpenAI's server sends one.
    with client_of(target, strict=False) as client:
        chunks = list(client.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == plain.choices[0].text
    assert chunks[-1].usage == plain.usage
    assert plain.system_fingerprint
    assert "Paris" in plain.choices[0].text
    return repr(plain.choices[0].text)


def _completion_with_every_field(target: Target) -> None:
    with client_of(target) as client:
        answer = client.completions.create(
            model=target.model,
            prompt=["Once upon a time", "Good morning"],
            best_of=3,
            n=2,
            frequency_penalty=0.5,
            presence_penalty=0.5,
            logit_bias={"100": -100},
            logprobs=2,
            max_tokens=6,
            seed=3,
            stop=["never this"],
            temperature=0.8,
            top_p=0.9,
            user="someone",
        )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == len(choice.logprobs.text_offset)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def _scored_prompt(target: Target) -> None:
    with client_of(target) as client:
        # Its types know no null for the first token of a prompt; OpenAI's server sends one.
        raw = client.completions.with_raw_response.create(
            model=target.model, prompt="The capital of France is Paris", max_tokens=0, echo=True, logprobs=1
        )
    logprobs = json.loads(raw.content)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == [0, 3, 11, 14, 21, 24]


def _logit_bias_decides(target: Target) -> None:
    with client_of(target) as client:
        wanted = client.completions.with_raw_response.create(
            model=target.model, prompt="a", max_tokens=0, extra_body={"return_token_ids": True}
        )
        [token] = json.loads(wanted.content)["choices"][0]["prompt_token_ids"]
        answer = client.completions.create(
            model=target.model, prompt="The capital of France is", max_tokens=3, logit_bias={str(token): 100}
        )
    assert answer.choices[0].text == "aaa"


def _plain_and_streamed_chat(target: Target) -> str:
    request = {"model": target.model, "messages": CAPITAL, "max_tokens": 32, "temperature": 0}
    with client_of(target) as client:
        plain = client.chat.completions.create(**request)
        chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
        with client.chat.completions.stream(**request) as stream:
            final = stream.get_final_completion()
    content = plain.choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == content
    assert final.choices[0].message.content == content
    usage = chunks[-1].usage
    assert usage.prompt_tokens_details.cached_tokens >= plain.usage.prompt_tokens_details.cached_tokens
    plain.usage.prompt_tokens_details.cached_tokens = usage.prompt_tokens_details.cached_tokens
    assert usage == plain.usage
    assert "Paris" in content
    return repr(content)


def _chat_with_every_field(target: Target) -> None:
    with client_of(target) as client:
        answer = client.chat.completions.create(
            model=target.model,
            messages=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "ann"},
            ],
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            logit_bias={"100": -100},
            logprobs=True,
            top_logprobs=3,
            max_completion_tokens=6,
            metadata={"a": "b"},
            n=2,
            seed=3,
            service_tier="auto",
            stop=["never this"],
            store=False,
            temperature=0.8,
            top_p=0.9,
            user="someone",
        )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 3
            assert isinstance(entry.bytes, list)


def _required_tool(target: Target) -> str:
    request = {
        "model": target.model,
        "messages": WEATHER_QUESTION,
        "tools": [WEATHER_TOOL],
        "parallel_tool_calls": False,
        "max_tokens": 80,
        "temperature": 0,
    }
    named = {"type": "function", "function": {"name": "get_weather"}}
    with client_of(target) as client:
        for choice in ("required", named):
            plain = client.chat.completions.create(**request, tool_choice=choice).choices[0]
            [call] = plain.message.tool_calls
            chunks = list(client.chat.completions.create(**request, tool_choice=choice, stream=True))
            deltas = [d for c in chunks if c.choices for d in c.choices[0].delta.tool_calls or []]
            assert "".join(delta.function.arguments or "" for delta in deltas) == call.function.arguments
            assert deltas[0].function.name == call.function.name == "get_weather"
            assert set(json.loads(call.function.arguments)) == {"city", "unit"}
            assert plain.finish_reason == "tool_calls"
    return call.function.arguments


def _tool_round_trip(target: Target) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *WEATHER_QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It rains, 4 degrees."},
    ]
    with client_of(target) as client:
        answer = client.chat.completions.create(
            model=target.model, messages=messages, tools=[WEATHER_TOOL], max_tokens=24, temperature=0
        )
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def _structured_chat(target: Target) -> str:
    request = {"model": target.model, "messages": WEATHER_QUESTION, "max_tokens": 60, "temperature": 0}
    with client_of(target) as client:
        parsed = client.chat.completions.parse(**request, response_format=Weather).choices[0].message.parsed
        assert isinstance(parsed, Weather)
        free = client.chat.completions.create(**request, response_format={"type": "json_object"}).choices[0]
        if free.finish_reason == "stop":
            json.loads(free.message.content)
    return repr(parsed)


def _structured_extensions(target: Target) -> str:
    request = {"model": target.model, "messages": CAPITAL, "max_tokens": 16, "temperature": 0}
    fields = [
        {"structured_outputs": {"choice": ["Paris", "Rome"]}},
        {"guided_choice": ["Paris", "Rome"]},
        {"guided_regex": "(Paris|Rome)"},
        {"structured_outputs": {"regex": "(Paris|Rome)"}},
        {"guided_grammar": 'root ::= "Paris" | "Rome"'},
    ]
    with client_of(target) as client:
        answers = [client.chat.completions.create(**request, extra_body=extra) for extra in fields]
    contents = [answer.choices[0].message.content for answer in answers]
    assert set(contents) <= {"Paris", "Rome"}, contents
    assert {answer.choices[0].finish_reason for answer in answers} == {"stop"}
    return repr(contents[0])


def _sampling_extensions(target: Target) -> None:
    with client_of(target) as client:
        answer = client.completions.with_raw_response.create(
            model=target.model,
            prompt="Once upon a time",
            max_tokens=8,
            extra_body={
                "top_k": 20,
                "min_p": 0.05,
                "repetition_penalty": 1.1,
                "min_tokens": 8,
                "stop_token_ids": [5],
                "bad_words": ["there"],
                "skip_special_tokens": False,
                "spaces_between_special_tokens": True,
                "include_stop_str_in_output": True,
                "prompt_logprobs": 1,
                "return_token_ids": True,
            },
        )
    body = json.loads(answer.content)
    assert "x-octavo-ignored-fields" not in answer.headers, answer.headers["x-octavo-ignored-fields"]
    assert body["usage"]["completion_tokens"] == 8
    assert "there" not in body["choices"][0]["text"]
    assert len(body["choices"][0]["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


def _embeddings(target: Target) -> str:
    # Its type of an embedding knows no base64, which it asks for itself unless it is told what to ask for.
    with client_of(target, strict=False) as client:
        texts = ["The food was delicious.", "The meal tasted great.", "Interest rates rose by a percent."]
        answer = client.embeddings.create(model=target.model, input=texts)
        floats = client.embeddings.create(model=target.model, input=texts[0], encoding_format="float")
    vectors = [entry.embedding for entry in answer.data]
    assert all(math.isclose(math.dist(vector, [0] * len(vector)), 1, abs_tol=1e-4) for vector in vectors)
    assert math.dist(vectors[0], floats.data[0].embedding) < 1e-3
    near, far = (sum(map(float.__mul__, vectors[0], vectors[i])) for i in (1, 2))
    assert near > far, (near, far)
    return f"{len(vectors[0])} dimensions, cosines {near:.3f} > {far:.3f}"


def _responses(target: Target) -> str:
    request = {"model": target.model, "input": CAPITAL[0]["content"], "max_output_tokens": 32, "temperature": 0}
    with client_of(target) as client:
        plain = client.responses.create(**request)
        events = list(client.responses.create(**request, stream=True))
        with client.responses.stream(**request) as stream:
            final = stream.get_final_response()
    assert plain.status == "completed"
    assert "Paris" in plain.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == plain.output_text
    assert final.output_text == plain.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert events[-1].response.usage == plain.usage
    return repr(plain.output_text)


def _responses_tool(target: Target) -> str:
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER_SCHEMA, "strict": True}
    request = {
        "model": target.model,
        "input": WEATHER_QUESTION,
        "max_output_tokens": 80,
        "temperature": 0,
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    with client_of(target) as client:
        [item] = client.responses.create(**request).output
        assert (item.type, item.name) == ("function_call", "get_weather")
        assert set(json.loads(item.arguments)) == {"city", "unit"}
        events = list(client.responses.create(**request, stream=True))
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == item.arguments
        output = {"type": "function_call_output", "call_id": item.call_id, "output": "It rains."}
        history = [*WEATHER_QUESTION, item.model_dump(), output]
        answer = client.responses.create(model=target.model, input=history, tools=[tool], max_output_tokens=16)
    assert answer.output
    return item.arguments


def _responses_structured(target: Target) -> str:
    with client_of(target) as client:
        answer = client.responses.parse(
            model=target.model,
            input=WEATHER_QUESTION[0]["content"],
            text_format=Weather,
            max_output_tokens=60,
            temperature=0,
        )
    assert isinstance(answer.output_parsed, Weather)
    return repr(answer.output_parsed)


def _models(target: Target) -> None:
    with client_of(target) as client:
        assert [model.id for model in client.models.list()] == [target.model]
        assert client.models.retrieve(target.model).id == target.model


def _errors(target: Target) -> None:
    request = {"model": target.model, "prompt": "a", "max_tokens": 2}
    with client_of(target) as client:
        for change, param in (({"temperature": -1}, "temperature"), ({"prompt": ""}, "prompt"), ({"n": 0}, "n")):
            try:
                client.completions.create(**{**request, **change})
            except openai.BadRequestError as error:
                assert error.body["param"] == param, error.body
                assert error.request_id
            else:
                raise AssertionError(f"{change} was taken")
        try:
            client.completions.create(**{**request, "model": "gpt-4"})
        except openai.NotFoundError as error:
            assert error.code == "model_not_found"
        else:
            raise AssertionError("another model was taken")


def _parallel(target: Target) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0) as client:
            request = {"model": target.model, "messages": CAPITAL, "max_tokens": 12, "temperature": 0}
            answers = await asyncio.gather(*(client.chat.completions.create(**request) for _ in range(8)))
        assert len({answer.choices[0].message.content for answer in answers}) == 1

    asyncio.run(run())


CALLS = (
    Call("completion, plain and streamed", _plain_and_streamed_completion),
    Call("completion with every field", _completion_with_every_field),
    Call("echo, logprobs and max_tokens 0 score", _scored_prompt),
    Call("logit_bias decides", _logit_bias_decides),
    Call("chat, plain, streamed and by the helper", _plain_and_streamed_chat),
    Call("chat with every field", _chat_with_every_field),
    Call("tool_choice required and named", _required_tool),
    Call("a tool's result goes back", _tool_round_trip),
    Call("chat.completions.parse and json_object", _structured_chat),
    Call("structured_outputs and guided fields", _structured_extensions),
    Call("vLLM's sampling fields", _sampling_extensions),
    Call("embeddings, base64 and float", _embeddings),
    Call("responses, plain, streamed and by the helper", _responses),
    Call("responses with a tool", _responses_tool),
    Call("responses.parse", _responses_structured),
    Call("models", _models),
    Call("errors name the field", _errors),
    Call("async client, 8 at once", _parallel),
    Call("the examples of OpenAI's description", replay_examples),
)
