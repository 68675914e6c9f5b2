"""A response of server-sent events that ends its work as soon as the client is gone. Knows no API."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.disconnect import ClientDisconnected, until_disconnect
from server.http_protocol import ChunkWriter, chunk_writer


class LastEvents(bytes):
    """The events after which none comes, to be sent with the end of the answer."""


class EventStream(Response):
    """Sends events as they come."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        divert: Callable[[ChunkWriter], None],
    ) -> None:
        """Begin with the events that are there.

        Args:
            first: events, framed (`server_sent_event`).
            rest: yields the others, has yielded `first`, and is closed whatever happens.
            headers: beside those of every stream.
            divert: lets events of `rest` be written in the moment in which they come, where the server can do that.
        """
        self._first = first
        self._rest = rest
        self._divert = divert
        self.status_code = 200
        self.background = None
        # No proxy on the way shall collect the events before it passes them on.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or as many as the client stays for."""
        try:
            await until_disconnect(receive, self._send(send, chunk_writer(scope)))
        except ClientDisconnected:
            return

    async def _send(self, send: Send, writer: ChunkWriter | None) -> None:
        async with aclosing(self._rest) as rest:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send(_message(self._first))
            if writer is not None:
                self._divert(writer)
            async for event in rest:
                if isinstance(event, LastEvents):
                    await send({"type": "http.response.body", "body": event, "more_body": False})
                    return
                await send(_message(event))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def server_sent_event(data: bytes, name: str | None = None) -> bytes:
    """One event. `data` is one line; OpenAI's older endpoints give their events no name."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + data + b"\n\n"


def _message(event: bytes) -> Message:
    return {"type": "http.response.body", "body": event, "more_body": True}
