"""langchain-openai: chat, completions, tools, structured output, embeddings."""

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from tests.clients.calls import CAPITAL, WEATHER_QUESTION, Call, Target


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"It rains in {city}."


def _chat_model(target: Target, **options: object) -> ChatOpenAI:
    chosen = {"max_tokens": 60, "temperature": 0, **options}
    return ChatOpenAI(model=target.model, base_url=f"{target.url}/v1", api_key="none", max_retries=0, **chosen)


def _chat(target: Target) -> str:
    model = _chat_model(target)
    messages = [SystemMessage("Be brief."), HumanMessage(CAPITAL[0]["content"])]
    plain = model.invoke(messages)
    chunks = list(model.stream(messages))
    assert "".join(chunk.content for chunk in chunks) == plain.content
    assert plain.usage_metadata["output_tokens"] > 0
    assert "Paris" in plain.content
    return repr(plain.content)


def _batch(target: Target) -> None:
    answers = _chat_model(target, max_tokens=8).batch([CAPITAL[0]["content"]] * 4)
    assert len({answer.content for answer in answers}) == 1


def _completion(target: Target) -> str:
    model = OpenAI(
        model=target.model, base_url=f"{target.url}/v1", api_key="none", max_tokens=8, temperature=0, max_retries=0
    )
    text = model.invoke("The capital of France is")
    assert "Paris" in text
    assert "".join(model.stream("The capital of France is")) == text
    return repr(text)


def _tools(target: Target) -> str:
    model = _chat_model(target).bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    answer = model.invoke(WEATHER_QUESTION[0]["content"])
    [call] = answer.tool_calls
    assert call["name"] == "get_weather"
    assert isinstance(call["args"]["city"], str)  # its schema allows more
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert _chat_model(target).invoke([HumanMessage("Weather in Oslo?"), answer, result]).content
    return str(call["args"])


def _structured(target: Target) -> str:
    answers = [
        _chat_model(target).with_structured_output(Weather, method=method).invoke(WEATHER_QUESTION[0]["content"])
        for method in ("json_schema", "function_calling")
    ]
    assert all(isinstance(answer, Weather) for answer in answers)
    return repr(answers[0])


def _responses(target: Target) -> str:
    answer = _chat_model(target, use_responses_api=True).invoke(CAPITAL[0]["content"])
    assert "Paris" in answer.text
    return repr(answer.text)


def _embeddings(target: Target) -> str:
    # Otherwise it sends token ids of OpenAI's vocabulary, which are none of this model's.
    model = OpenAIEmbeddings(
        model=target.model,
        base_url=f"{target.url}/v1",
        api_key="none",
        max_retries=0,
        check_embedding_ctx_length=False,
    )
    vectors = model.embed_documents(["one", "two"])
    assert len(vectors) == 2
    assert model.embed_query("one")
    return f"{len(vectors[0])} dimensions"


CALLS = (
    Call("ChatOpenAI, plain and streamed", _chat),
    Call("ChatOpenAI.batch", _batch),
    Call("OpenAI, plain and streamed", _completion),
    Call("bind_tools, result goes back", _tools),
    Call("with_structured_output", _structured),
    Call("ChatOpenAI over responses", _responses),
    Call("OpenAIEmbeddings", _embeddings),
)
