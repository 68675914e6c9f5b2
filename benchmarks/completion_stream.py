"""One streamed completion from an OpenAI-compatible server, timed piece by piece. Knows no load and no statistics.

`read_answer` makes an answer of a stream's events, of completions and of chats alike, however they were received.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx


class RequestFailed(Exception):
    """No complete answer came; the message says what came instead."""


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One complete answer."""

    arrivals: tuple[float, ...]  # seconds from sending the request to each piece of text
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None = None  # of the prompt, from the server's cache; None: it does not say
    text: str = ""

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
    events: list[tuple[float, str]] = []
    start = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise refused(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    events.append((time.perf_counter() - start, line.removeprefix("data:").strip()))
    except httpx.HTTPError as error:
        raise RequestFailed(f"{type(error).__name__}: {error}") from error
    return read_answer(events, num_tokens)


def refused(status: int, body: bytes) -> RequestFailed:
    """What to raise for an answer of another status than 200."""
    return RequestFailed(f"status {status}: {body.decode('utf-8', 'replace')[:200]}")


def read_answer(events: Iterable[tuple[float, str]], num_tokens: int) -> TimedAnswer:
    """The answer that a stream's events make: seconds since the request, and what stood after `data:`.

    Raises:
        RequestFailed: an event is an error, the last is not `[DONE]`, or the answer has not `num_tokens` tokens.
    """
    arrivals: list[float] = []
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    for seconds, data in events:
        if data == "[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            raise RequestFailed(f"error event: {event['error'].get('message', event['error'])}")
        text = "".join(map(_text_of, event["choices"]))
        if text:
            arrivals.append(seconds)
            pieces.append(text)
        usage = event.get("usage") or usage
    else:
        raise RequestFailed("the stream broke off before [DONE]")
    if not arrivals or not usage:
        raise RequestFailed("the stream brought no text" if usage else "the stream brought no usage")
    if usage["completion_tokens"] != num_tokens:
        raise RequestFailed(f"{usage['completion_tokens']} tokens came, not {num_tokens}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return TimedAnswer(tuple(arrivals), usage["prompt_tokens"], num_tokens, cached, "".join(pieces))


def _text_of(choice: dict[str, Any]) -> str:
    """The text of one choice of an event: a completion's, or what a chat's message grows by."""
    text: str | None = choice["text"] if "text" in choice else choice["delta"].get("content")
    return text or ""
