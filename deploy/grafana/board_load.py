"""Keeps a server busy in every way that a board shows: several keys, shared prefixes, n > 1, grammars, errors, leavers.

For a pool of KV blocks that is small enough for sequences to be preempted. Knows no board.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx

_REST_SECONDS = 0.2  # between a caller's requests, so that the server also waits now and then
_LEAVES_AFTER_SECONDS = 0.5
_STORY = "Once upon a time there was a lighthouse keeper who counted the ships that passed his island. " * 4


async def keep_busy(url: str, model: str, keys: Sequence[str], stop: asyncio.Event) -> None:
    """Send requests of all kinds, each kind from a caller of its own, until `stop` is set.

    Raises:
        httpx.HTTPError: the server cannot be reached any more.
    """
    kinds = (_tells_on, _draws_three, _fills_a_form, _converses, _asks_for_too_much, _leaves_early)
    async with asyncio.TaskGroup() as callers:
        for kind, key in zip([*kinds, _tells_on, _tells_on], itertools.cycle(keys), strict=False):
            callers.create_task(_call(url, model, key, kind, stop))


async def _call(url: str, model: str, key: str, kind: Callable[[str, int], "_Request"], stop: asyncio.Event) -> None:
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False) as client:
        for number in itertools.count():
            if stop.is_set():
                return
            request = kind(model, number)
            with suppress(httpx.ReadTimeout):
                await client.post(request.path, json=request.body, timeout=request.patience)
            await asyncio.sleep(_REST_SECONDS)


class _Request:
    """What a caller sends, and for how long he waits."""

    def __init__(self, path: str, body: Mapping[str, Any], patience: float = 120.0) -> None:
        self.path = path
        self.body = dict(body)
        self.patience = patience  # seconds, after which the caller leaves


def _tells_on(model: str, number: int) -> _Request:
    """A prompt that begins as the last one did, and an answer of a hundred tokens."""
    prompt = f"{_STORY}On day {number}"
    return _Request("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 100, "ignore_eos": True})


def _draws_three(model: str, number: int) -> _Request:
    """Three answers, which share the prompt's blocks until they write into the last of them."""
    body = {"model": model, "prompt": f"{number}: the sea", "max_tokens": 40, "n": 3, "ignore_eos": True}
    return _Request("/v1/completions", body)


def _fills_a_form(model: str, number: int) -> _Request:
    """A grammar that has to be compiled first."""
    schema = {"type": "object", "properties": {f"field_{number}": {"type": "boolean"}}, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    message = {"role": "user", "content": "Fill in the form."}
    return _Request(
        "/v1/chat/completions", {"model": model, "messages": [message], "max_tokens": 30, "response_format": form}
    )


def _converses(model: str, number: int) -> _Request:
    """A conversation."""
    message = {"role": "user", "content": f"What is {number} plus one?"}
    return _Request("/v1/chat/completions", {"model": model, "messages": [message], "max_tokens": 20})


def _asks_for_too_much(model: str, _number: int) -> _Request:
    """What is refused with 400."""
    return _Request("/v1/completions", {"model": model, "prompt": "x", "max_tokens": -1})


def _leaves_early(model: str, number: int) -> _Request:
    """An answer that nobody waits for."""
    body = {"model": model, "prompt": f"{number} and", "max_tokens": 400, "ignore_eos": True}
    return _Request("/v1/completions", body, _LEAVES_AFTER_SECONDS)
