"""uvicorn's HTTP protocol with limits on what a client may send and how long it may take, below the application.

httptools collects a header of any size before it hands it over, so the bytes are counted as they arrive. Errors have
OpenAI's shape. Knows no route.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import ClassVar

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.errors import InvalidRequest
from server.protocol.responses import to_json

_CHUNK_WRITER = "octavo.chunk_writer"  # among the extensions of a scope


class ChunkWriter:
    """Writes pieces of an answer that has begun in the moment in which they are there, without a task that sends them.

    For answers without a length. What is written so comes after what the application has sent, if that has returned.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        """For the answer to one request."""
        self.num_bytes = 0  # written so, without the framing
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """The answer has begun and not ended, the client is there, and reads what it gets."""
        cycle = self._cycle
        is_open = cycle.response_started and not (cycle.response_complete or cycle.disconnected)
        return is_open and bool(cycle.chunked_encoding) and not cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """Send a piece, not empty. To be called while it is ready."""
        self.num_bytes += len(data)
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def chunk_writer(scope: Scope) -> ChunkWriter | None:
    """Of a request; None where another server runs the application."""
    writer: ChunkWriter | None = scope.get("extensions", {}).get(_CHUNK_WRITER)
    return writer


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes the connection of a client who does not come to the end of a head, a body or its trailers."""

    max_head_bytes: ClassVar[int] = 64 * 1024  # of a request line and its headers; as many again for trailers
    max_pipelined: ClassVar[int] = 64  # requests that wait for the answer to the one before
    head_seconds: ClassVar[float] = 30.0  # from the connection, or the first byte, to the end of the head
    idle_body_seconds: ClassVar[float] = 60.0  # between two pieces of a body
    body_seconds: ClassVar[float] = 600.0  # for the whole of it
    linger_seconds: ClassVar[float] = 5.0  # for the rest of a body that was answered before its end

    _part = "idle"  # of a request, that is being read: head, body or trailers
    _num_parts = 0  # that were begun on this connection
    _num_part_bytes = 0
    _num_head_bytes = 0  # of the pieces that were handed over
    _deadline: asyncio.TimerHandle | None = None
    _last_body_time = 0.0
    _body_began = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there. One that vanishes without a word is noticed within some minutes."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._set_deadline(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, then count what was parsed as part of a head or of trailers."""
        if self._deadline is None and self._part == "idle" and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()  # blank lines may come before a request, and take away the limit on silence
        num_parts = self._num_parts + (self._part == "idle")  # a head that begins does so with the data
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._part in ("head", "trailers"):
            # Of data in which a part begins, nobody knows how much belongs to it; there is one such read for each.
            self._num_part_bytes += len(data) if num_parts == self._num_parts else 0
            if self._num_part_bytes > self.max_head_bytes:
                self._refuse_head()
        elif len(self.pipeline) > self.max_pipelined:
            self._refuse(400, "Bad Request", "Too many requests were sent before their answers were read.")

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._begin("head")
        self._num_head_bytes = 0
        self._expect_head()

    def on_headers_complete(self) -> None:
        """A head ends."""
        if self._num_head_bytes > self.max_head_bytes:
            self._refuse_head()
            return
        self._begin("body")
        self._last_body_time = self._body_began = self.loop.time()
        self._set_deadline(self.idle_body_seconds, self._check_body)
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["extensions"] = {_CHUNK_WRITER: ChunkWriter(self.cycle)}  # type: ignore[typeddict-item]

    def on_chunk_header(self) -> None:
        """A piece of a body begins; after the last one, which is empty, trailers may come."""
        self._begin("trailers")

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._begin("body")
        self._last_body_time = self.loop.time()
        if not self.transport.is_closing():
            super().on_body(body)

    def on_url(self, url: bytes) -> None:
        """A piece of the address."""
        self._num_head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. Trailers are none: whoever decides by the headers has done so already."""
        if self._part == "head":
            self._num_head_bytes += len(name) + len(value)
            super().on_header(name, value)

    def on_message_complete(self) -> None:
        """A request ends."""
        self._begin("idle")
        self._set_deadline(None)
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer ends, perhaps before the request does: then its rest is read, but not for long."""
        super().on_response_complete()
        if self._part in ("body", "trailers") and not self.transport.is_closing():
            self._set_deadline(self.linger_seconds, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP."""
        self._refuse(400, "Bad Request", msg)

    def _begin(self, part: str) -> None:
        self._part = part
        self._num_parts += 1
        self._num_part_bytes = 0

    def _expect_head(self) -> None:
        self._set_deadline(self.head_seconds, self._give_up)

    def _check_body(self) -> None:
        """Close if nothing came for long, or too little; while the application does not read, nothing can come."""
        now = self.loop.time()
        if self.flow.read_paused:
            self._last_body_time = now
        ends = min(self._last_body_time + self.idle_body_seconds, self._body_began + self.body_seconds)
        if now >= ends:
            self._give_up()
        else:
            self._set_deadline(ends - now, self._check_body)

    def _set_deadline(self, seconds: float | None, then: Callable[[], object] | None = None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None or then is None else self.loop.call_later(seconds, then)

    def _give_up(self) -> None:
        """The client was too slow."""
        self._deadline = None
        if self.transport.is_closing():
            return
        if self._part == "idle":  # nothing came at all
            self.transport.close()
        else:
            self._refuse(408, "Request Timeout", "The request did not come to its end in time.")

    def _refuse_head(self) -> None:
        self._refuse(431, "Request Header Fields Too Large", "The request's headers are too large.")

    def _refuse(self, status: int, reason: str, message: str) -> None:
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()  # an answer is on its way, and cannot be taken back
            return
        body = to_json(InvalidRequest(message).body())
        head = (
            f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()
