"""How messages travel between the edge and the engine process: length-prefixed msgpack over a socket pair.

Knows no message. Never pickle: what arrives is decoded into declared types or refused.
"""

import asyncio
import socket
import struct

import msgspec

_LENGTH = struct.Struct("<I")


class MessageCodec:
    """Encodes any declared message, decodes those of one union."""

    def __init__(self, receives: object) -> None:
        """Decode messages of the type or union `receives`."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(receives)

    def encode(self, message: object) -> bytes:
        """One frame: the length of the payload as four bytes, then the payload."""
        payload = self._encoder.encode(message)
        return _LENGTH.pack(len(payload)) + payload

    def receive(self, connection: socket.socket) -> object | None:
        """Wait for the next message; None when the other side is gone."""
        header = _receive_exactly(connection, _LENGTH.size)
        payload = header and _receive_exactly(connection, _LENGTH.unpack(header)[0])
        return self._decoder.decode(payload) if payload else None

    async def receive_async(self, reader: asyncio.StreamReader) -> object | None:
        """The same on an event loop."""
        try:
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            return self._decoder.decode(await reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes | None:
    received = bytearray()
    while len(received) < num_bytes:
        try:
            chunk = connection.recv(min(num_bytes - len(received), 1 << 20))
        except ConnectionError:
            return None
        if not chunk:
            return None
        received += chunk
    return bytes(received)
