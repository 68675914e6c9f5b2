"""One streamed completion from an OpenAI-compatible server, timed piece by piece. Knows no load and no statistics."""

import json
import time
from dataclasses import dataclass
from itertools import pairwise

import httpx


class RequestFailed(Exception):
    """No complete answer came; the message says what came instead."""


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One complete answer."""

    arrivals: tuple[float, ...]  # seconds from sending the request to each piece of text
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def first_token_seconds(self) -> float:
        """Time to the first text."""
        return self.arrivals[0]

    @property
    def inter_token_seconds(self) -> list[float]:
        """Times between pieces of text: one token each, but where a character needs several."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]


async def stream_completion(
    client: httpx.AsyncClient, model: str, prompt: str, num_tokens: int, cache_salt: str | None = None
) -> TimedAnswer:
    """Ask for exactly `num_tokens` tokens, greedily, and read them as they come.

    With another `cache_salt` a prompt that was asked before is computed anew.

    Raises:
        RequestFailed: the server could not be reached, refused, broke off, or gave another number of tokens.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": cache_salt,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                raise RequestFailed(f"status {response.status_code}: {text[:200]}")
            answer = await _read_events(response, start)
    except httpx.HTTPError as error:
        raise RequestFailed(f"{type(error).__name__}: {error}") from error
    if answer.num_output_tokens != num_tokens:
        raise RequestFailed(f"{answer.num_output_tokens} tokens came, not {num_tokens}")
    return answer


async def _read_events(response: httpx.Response, start: float) -> TimedAnswer:
    arrivals: list[float] = []
    usage: dict[str, int] = {}
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            raise RequestFailed(f"error event: {event['error'].get('message', event['error'])}")
        if any(choice["text"] for choice in event["choices"]):
            arrivals.append(time.perf_counter() - start)
        usage = event.get("usage") or usage
    else:
        raise RequestFailed("the stream broke off before [DONE]")
    if not arrivals or not usage:
        raise RequestFailed("the stream brought no text" if usage else "the stream brought no usage")
    return TimedAnswer(tuple(arrivals), usage["prompt_tokens"], usage["completion_tokens"])
