"""What the generating routes have in common: body to request, request to deltas, deltas to an answer or a stream.

A route brings a function that reads its body, and an `AnswerWriter` that knows the form of its answers.
"""

import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import quote

import msgspec
from fastapi import Request
from starlette.responses import Response

from server.disconnect import until_disconnect
from server.edge import Edge, key_name_of
from server.error_responses import as_api_error
from server.errors import ApiError, BodyTooLarge
from server.event_stream import EventStream, LastEvents, server_sent_event
from server.generation import ChoiceDelta, ChoiceResult, Generation, TokenCounts
from server.http_protocol import ChunkWriter
from server.json_response import JsonResponse
from server.off_loop import is_large, off_loop_if_large
from server.preparation import PreparedRequest
from server.protocol.responses import to_json
from server.served_model import ServedModel
from server.span_attributes import generation_attributes

IGNORED_FIELDS_HEADER = "x-octavo-ignored-fields"
TRUNCATED_TOKENS_HEADER = "x-octavo-truncated-prompt-tokens"
_OBFUSCATED_SIZE = 64  # bytes: the chunks of most tokens come out equally large
_EMPTY_OBFUSCATION = ',"obfuscation":""'
PLACEHOLDER = "\x00text\x00"  # which no name of a model holds
DONE = server_sent_event(b"[DONE]")  # ends the streams of completions and chat


Prepared = TypeVar("Prepared", bound=PreparedRequest)


class Head(msgspec.Struct, frozen=True):
    """What every answer and every chunk of it carries."""

    id: str
    created: int
    model: str
    system_fingerprint: str = ""


class AnswerWriter(Protocol):
    """Writes the answer to one request in the form of its route, whole or as the events of a stream."""

    def whole(self, results: list[ChoiceResult], counts: TokenCounts) -> Any:  # noqa: ANN401
        """The body of an answer that is not streamed, to be encoded as JSON."""
        ...

    def delta(self, delta: ChoiceDelta, counts: TokenCounts) -> list[bytes]:
        """The events for the next piece of one choice; the first call also brings those that begin the stream."""
        ...

    def end(self, counts: TokenCounts) -> list[bytes]:
        """The events after the last piece."""
        ...

    def failed(self, error: ApiError) -> list[bytes]:
        """The last events of a stream that cannot go on."""
        ...


@dataclass(frozen=True, slots=True)
class Route(Generic[Prepared]):
    """One generating endpoint."""

    id_prefix: str
    prepare: Callable[[bytes, ServedModel], Prepared]  # a function of its module: it may run in another process
    writer: Callable[[Prepared, Head], AnswerWriter]  # for the answer to one request


def has_plain_chunks(request: PreparedRequest) -> bool:
    """Whether the chunks of one choice differ in nothing but their text, those at its beginning and its end apart."""
    counts = request.continuous_usage or request.include_timings or request.include_obfuscation
    return request.logprobs is None and not (request.return_token_ids or counts)


def chunk_event(chunk: msgspec.Struct, name: str | None = None, *, obfuscate: bool = False) -> bytes:
    """One chunk of a stream; only newer APIs name theirs. `obfuscate` fills it up to a multiple of some size."""
    data = to_json(chunk)
    if obfuscate:
        num_missing = -(len(data) + len(_EMPTY_OBFUSCATION)) % _OBFUSCATED_SIZE
        padding = secrets.token_urlsafe(num_missing)[:num_missing]
        data = to_json(msgspec.structs.replace(chunk, obfuscation=padding))
    return server_sent_event(data, name)


class TextChunks:
    """The chunks of one choice that differ in their text alone: written into the place of another's text.

    What is around it is taken from a chunk that was written in full, so that there is one way to write it.
    """

    def __init__(self, event: bytes) -> None:
        """`event` is a chunk with `PLACEHOLDER` for its text."""
        self._before, self._after = event.split(to_json(PLACEHOLDER))

    def event(self, text: str) -> bytes:
        """The chunk with this text."""
        return self._before + to_json(text) + self._after


async def answer(request: Request, edge: Edge, route: Route[Prepared]) -> Response:
    """Answer one request for generated text. Raises ApiError and the engine client's errors until an answer begins."""
    arrival = time.perf_counter()
    body = await read_body(request, edge.settings.max_body_size)
    return await until_disconnect(request.receive, _answer(request, body, arrival, edge, route))


async def _answer(request: Request, body: bytes, arrival: float, edge: Edge, route: Route[Prepared]) -> Response:
    fingerprint = edge.fingerprint()
    prepared = await edge.preparer.run(route.prepare, body, edge.served_model(), key_name_of(request))
    head = Head(f"{route.id_prefix}{uuid.uuid4().hex}", int(time.time()), prepared.model, fingerprint)
    writer = route.writer(prepared, head)
    trace = edge.trace(request, head.id, prepared.model, len(prepared.prompts))
    if trace.span is not None:
        trace.span.describe(generation_attributes(prepared))
    submitter = edge.submitter(request)
    generation = Generation(prepared, trace, edge.engine, edge.tokenizer, edge.metrics, arrival, submitter)
    headers = _headers(prepared)
    if not prepared.stream:
        results = await generation.result()
        num_repeated = prepared.n * generation.counts.num_prompt_tokens if prepared.return_token_ids else 0
        num_values = num_repeated + sum(_num_values(prepared, result) for result in results)
        content = await off_loop_if_large(num_values, lambda: to_json(writer.whole(results, generation.counts)))
        return JsonResponse([content], headers)
    events = _events(prepared, generation, writer)
    # The first event decides on the status: a request that the engine refuses is answered with 400, not with a stream.
    return EventStream(
        await anext(events),
        events,
        headers,
        lambda chunks: generation.divert(partial(_write_at_once, prepared, generation, writer, chunks)),
    )


async def _events(
    prepared: PreparedRequest, generation: Generation, writer: AnswerWriter
) -> AsyncGenerator[bytes, None]:
    has_begun = False
    async with aclosing(generation.deltas()) as deltas:
        try:
            async for delta in deltas:
                write = partial(writer.delta, delta, generation.counts)
                for event in await off_loop_if_large(_num_values(prepared, delta), write):
                    has_begun = True
                    yield event
        except Exception as error:
            if not has_begun:
                raise
            yield LastEvents(b"".join(writer.failed(as_api_error(error))))
            return
    yield LastEvents(b"".join(writer.end(generation.counts)))


def _write_at_once(
    prepared: PreparedRequest, generation: Generation, writer: AnswerWriter, chunks: ChunkWriter, delta: ChoiceDelta
) -> bool:
    """Write the events for a delta, if the client takes them now and they are not many."""
    if not chunks.is_ready or is_large(_num_values(prepared, delta)):
        return False
    events = writer.delta(delta, generation.counts)
    if events:
        chunks.write(b"".join(events))
    return True


def _num_values(request: PreparedRequest, part: ChoiceDelta | ChoiceResult) -> int:
    """How much there is to write of a choice: token ids and log-probabilities."""
    num_values = len(part.token_ids) + len(part.tokens) * (1 + (request.logprobs or 0))
    if isinstance(part, ChoiceResult):
        num_values += len(part.prompt_tokens) * (1 + (request.prompt_logprobs or 0))
    return num_values


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises BodyTooLarge as soon as it is known to be larger than `limit` bytes."""
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


def _headers(request: PreparedRequest) -> Mapping[str, str]:
    """What the caller is told beside the answer."""
    headers = dict(ignored_fields_header(request.ignored_fields))
    if request.num_truncated_tokens:
        headers[TRUNCATED_TOKENS_HEADER] = str(request.num_truncated_tokens)
    return headers


def ignored_fields_header(names: Sequence[str]) -> Mapping[str, str]:
    """Tells the caller which of his fields nobody knows."""
    return {IGNORED_FIELDS_HEADER: ",".join(quote(name, safe="") for name in names)} if names else {}
