"""What the two generating routes have in common: body to request, request to deltas, deltas to an answer or a stream.

A route brings two functions that read its body, and a `Shape` that writes its answers.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol
from urllib.parse import quote

import msgspec
from fastapi import Request
from starlette.responses import Response

from server.disconnect import until_disconnect
from server.edge import Edge
from server.error_responses import as_api_error
from server.errors import BodyTooLarge
from server.event_stream import EventStream
from server.generation import ChoiceDelta, ChoiceResult, Generation
from server.off_loop import off_loop_if_large
from server.preparation import PreparedRequest, ServedModel
from server.protocol.responses import Usage, to_json
from server.protocol.shaping import usage

IGNORED_FIELDS_HEADER = "x-octavo-ignored-fields"
_DONE = b"[DONE]"


class Shape(Protocol):
    """Writes the answers of one route: completions or chat."""

    id_prefix: str

    def whole(self, request: PreparedRequest, results: list[ChoiceResult], head: "Head", counts: Usage) -> Any:  # noqa: ANN401
        """The body of an answer that is not streamed."""
        ...

    def chunk(self, request: PreparedRequest, delta: ChoiceDelta, head: "Head", *, first: bool) -> msgspec.Struct:
        """One event of a stream. `first`: of its choice."""
        ...

    def usage_chunk(self, head: "Head", counts: Usage) -> msgspec.Struct:
        """The event with the counts, after all others."""
        ...


class Head(msgspec.Struct, frozen=True):
    """What every answer and every chunk of it carries."""

    id: str
    created: int
    model: str


async def answer(
    request: Request, edge: Edge, prepare: Callable[[bytes, ServedModel], PreparedRequest], shape: Shape
) -> Response:
    """Answer one request for generated text. Raises ApiError and the engine client's errors until an answer begins."""
    arrival = time.perf_counter()
    body = await _read_body(request, edge.settings.max_body_size)
    return await until_disconnect(request.receive, _answer(body, arrival, edge, prepare, shape))


async def _answer(
    body: bytes,
    arrival: float,
    edge: Edge,
    prepare: Callable[[bytes, ServedModel], PreparedRequest],
    shape: Shape,
) -> Response:
    prepared = await asyncio.to_thread(prepare, body, edge.served_model())
    head = Head(f"{shape.id_prefix}{uuid.uuid4().hex}", int(time.time()), prepared.model)
    generation = Generation(prepared, head.id, edge.engine, edge.tokenizer, edge.metrics, arrival)
    headers = _ignored_fields_header(prepared)
    if not prepared.stream:
        results = await generation.result()
        counts = usage(generation.num_prompt_tokens, generation.num_completion_tokens)
        num_repeated = prepared.n * generation.num_prompt_tokens if prepared.return_token_ids else 0
        num_values = num_repeated + sum(_num_values(prepared, result) for result in results)
        content = await _written(num_values, partial(shape.whole, prepared, results, head, counts))
        return Response(content, headers=dict(headers), media_type="application/json")
    events = _events(prepared, generation, head, shape)
    # The first event decides on the status: a request that the engine refuses is answered with 400, not with a stream.
    return EventStream(await anext(events), events, headers)


async def _events(
    prepared: PreparedRequest, generation: Generation, head: Head, shape: Shape
) -> AsyncGenerator[bytes, None]:
    begun: set[int] = set()
    async with aclosing(generation.deltas()) as deltas:
        try:
            async for delta in deltas:
                chunk = partial(shape.chunk, prepared, delta, head, first=delta.index not in begun)
                content = await _written(_num_values(prepared, delta), chunk)
                begun.add(delta.index)
                yield content
        except Exception as error:
            if not begun:
                raise
            yield to_json(as_api_error(error).body())
            return
    if prepared.include_usage:
        counts = usage(generation.num_prompt_tokens, generation.num_completion_tokens)
        yield to_json(shape.usage_chunk(head, counts))
    yield _DONE


def _num_values(request: PreparedRequest, part: ChoiceDelta | ChoiceResult) -> int:
    """How much there is to write of a choice: token ids and log-probabilities."""
    return len(part.token_ids) + len(part.tokens) * (1 + (request.logprobs or 0))


async def _written(num_values: int, body: Callable[[], msgspec.Struct]) -> bytes:
    return await off_loop_if_large(num_values, lambda: to_json(body()))


async def _read_body(request: Request, limit: int) -> bytes:
    message = f"The body is larger than the {limit} bytes that this server takes."
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > limit:
        raise BodyTooLarge(message)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise BodyTooLarge(message)
    return bytes(body)


def _ignored_fields_header(prepared: PreparedRequest) -> Mapping[str, str]:
    if not prepared.ignored_fields:
        return {}
    return {IGNORED_FIELDS_HEADER: ",".join(quote(name, safe="") for name in prepared.ignored_fields)}
