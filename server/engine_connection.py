"""The edge's end of the connection to the engine process: hands messages on as they arrive. Knows none of them.

Without a stream and a task to read it: a step's message is decoded and handed on in the turn of the event loop in which
it arrives.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from server.ipc import Frames, MessageCodec


class EngineConnection(asyncio.Protocol):
    """One connection, from when the process is started until it is gone."""

    def __init__(self, codec: MessageCodec, on_message: Callable[[object], None]) -> None:
        """Every message goes to `on_message`, in order."""
        self._codec = codec
        self._on_message = on_message
        self._frames = Frames()
        self._transport: asyncio.WriteTransport | None = None
        # Done when nothing more comes; with the error that `on_message` or the codec raised, if one did.
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        """Messages can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's are of no class of asyncio's

    def data_received(self, data: bytes) -> None:
        """Called by the event loop with whatever has arrived."""
        try:
            for payload in self._frames.take(data):
                self._on_message(self._codec.decode(payload))
        except Exception as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop. Why the engine is gone its exit status tells better than the connection."""
        self._end(None)

    def send(self, message: object) -> None:
        """Send a message, which waits here while the engine does not read. The connection must be open."""
        assert self._transport is not None
        self._transport.write(self._codec.encode(message))

    def close(self) -> None:
        """Send what waits, and nothing more. The engine's process ends when it sees that."""
        if self._transport is not None:
            self._transport.close()

    def _end(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None) if error is None else self.lost.set_exception(error)
        self.close()
