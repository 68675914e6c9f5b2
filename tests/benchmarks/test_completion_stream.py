"""A streamed completion is read and timed right; everything short of a whole answer is a failure with its reason."""

import json

import httpx
import pytest

from benchmarks.completion_stream import RequestFailed, stream_completion


def text(*pieces: str) -> list[str]:
    return [json.dumps({"choices": [{"text": piece}], "usage": None}) for piece in pieces]


def usage(num_tokens: int) -> str:
    return json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": num_tokens}})


def events(*data: str) -> httpx.Response:
    return httpx.Response(200, text="".join(f"data: {one}\n\n" for one in data))


async def ask(response: httpx.Response | Exception, sent: list[dict] | None = None, num_tokens: int = 3):
    def handle(request: httpx.Request) -> httpx.Response:
        if sent is not None:
            sent.append(json.loads(request.content))
        if isinstance(response, Exception):
            raise response
        return response

    async with httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://server") as client:
        return await stream_completion(client, "m", "a prompt", num_tokens)


async def test_whole_answer():
    sent: list[dict] = []
    answer = await ask(events(*text("a", "", "b", "c"), usage(3), "[DONE]"), sent)
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (7, 3)
    # a piece without text is not what a reader waits for
    assert len(answer.arrivals) == 3
    assert 0 < answer.first_token_seconds == answer.arrivals[0]
    assert len(answer.inter_token_seconds) == 2
    assert sum(answer.inter_token_seconds) == pytest.approx(answer.arrivals[-1] - answer.arrivals[0])
    (body,) = sent
    assert (body["model"], body["prompt"], body["max_tokens"], body["temperature"]) == ("m", "a prompt", 3, 0)
    assert body["stream"] and body["ignore_eos"] and body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (httpx.Response(503, text="draining"), "status 503: draining"),
        (httpx.ConnectError("refused"), "ConnectError: refused"),
        (httpx.ReadTimeout("slow"), "ReadTimeout: slow"),
        (events(*text("a"), json.dumps({"error": {"message": "engine died"}})), "error event: engine died"),
        (events(*text("a", "b", "c"), usage(3)), "broke off"),
        (events(*text("a", "b"), usage(2), "[DONE]"), "2 tokens came, not 3"),
        (events(*text("a", "b", "c"), "[DONE]"), "no usage"),
        (events(usage(3), "[DONE]"), "no text"),
    ],
)
async def test_anything_less_fails(response, reason):
    with pytest.raises(RequestFailed, match=reason):
        await ask(response)
