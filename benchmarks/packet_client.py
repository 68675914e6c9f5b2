"""Requests whose answers are kept as packets with their times and read after the clock has stopped.

Made to take next to nothing from the processors that it shares with the server. Knows HTTP, no load.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import httptools

from benchmarks.completion_stream import RequestFailed, TimedAnswer, read_answer, refused

_END_OF_CHUNKS = b"\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Packets:
    """What came back for one request, as it came."""

    start: float  # when the request was sent: time.perf_counter()
    received: tuple[tuple[float, bytes], ...]  # the same clock, bytes of HTTP
    error: str | None  # why nothing more came, where that was no regular end


class PacketClient:
    """Sends requests to one server, each on a connection of its own."""

    def __init__(self, port: int, timeout: float) -> None:
        """Talks to this port of the machine itself, and waits `timeout` seconds for a whole answer."""
        self._port = port
        self._timeout = timeout

    async def post(self, path: str, body: Mapping[str, Any]) -> Packets:
        """Send `body` as JSON and take in all packets of the answer. Says in the result what went wrong."""
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        start = time.perf_counter()
        exchange = _Exchange(head.encode() + content, loop.create_future())
        error: str | None = None
        try:
            async with asyncio.timeout(self._timeout):
                await loop.create_connection(lambda: exchange, "127.0.0.1", self._port)
                await exchange.ended
        except TimeoutError:
            error = f"no whole answer within {self._timeout:g} seconds"
        except OSError as failure:
            error = f"{type(failure).__name__}: {failure}"
        finally:
            exchange.close()
        return Packets(start, tuple(exchange.received), error)


class _Exchange(asyncio.Protocol):
    """Writes the request once it is connected, and keeps what comes until the last chunk or the end."""

    def __init__(self, request: bytes, ended: asyncio.Future[None]) -> None:
        self.received: list[tuple[float, bytes]] = []
        self.ended = ended
        self._request = request
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        # uvloop's transports are asyncio's by their methods, not by their classes.
        transport = cast(asyncio.WriteTransport, transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.received.append((time.perf_counter(), data))
        # An end that comes in two pieces is found when the server closes, as it was asked to.
        if data.endswith(_END_OF_CHUNKS) and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, failure: Exception | None) -> None:
        if self.ended.done():
            return
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failure)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def read_packets(packets: Packets, num_tokens: int) -> TimedAnswer:
    """The answer in the packets, which must have `num_tokens` tokens.

    Raises:
        RequestFailed: it is not whole, or none; the message says what came instead.
    """
    response = _Response()
    try:
        for when, data in packets.received:
            response.feed(when - packets.start, data)
    except httptools.HttpParserError as error:
        raise RequestFailed(f"no HTTP: {error}") from error
    if response.status not in (0, 200):
        raise refused(response.status, response.body)
    if packets.error is not None:
        raise RequestFailed(packets.error)
    answer = read_answer(response.events, num_tokens)
    if num_tokens > 1 and len(answer.arrivals) == 1:
        raise RequestFailed(f"the text of {num_tokens} tokens came in one piece")
    return answer


class _Response:
    """Takes HTTP apart into events, each with the time of the packet that completed it."""

    def __init__(self) -> None:
        self.status = 0  # no answer so far
        self.body = b""
        self.events: list[tuple[float, str]] = []
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._rest = b""  # of a line whose end has not come

    def feed(self, now: float, data: bytes) -> None:
        self._now = now
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self.status != 200:
            self.body += data
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self.events.append((self._now, line.removeprefix(b"data:").strip().decode()))
