"""How messages travel between the processes of the server: length-prefixed msgpack over a socket pair.

Knows no message. Never pickle: what arrives is decoded into declared types or refused. Token ids travel packed.
"""

import asyncio
import socket
import struct
from typing import Any

import msgspec

from server.token_ids import TokenIds

_LENGTH = struct.Struct("<I")


class MessageCodec:
    """Encodes any declared message, decodes those of one union."""

    def __init__(self, receives: object) -> None:
        """Decode messages of the type or union `receives`."""
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_custom)
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(receives, dec_hook=_decode_custom)

    def encode(self, message: object) -> bytes:
        """One frame: the length of the payload as four bytes, then the payload."""
        payload = self._encoder.encode(message)
        return _LENGTH.pack(len(payload)) + payload

    def receive(self, connection: socket.socket) -> object | None:
        """Wait for the next message; None when the other side is gone."""
        payload = receive_payload(connection)
        return self._decoder.decode(payload) if payload else None

    async def receive_async(self, reader: asyncio.StreamReader) -> object | None:
        """The same on an event loop."""
        try:
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            return self._decoder.decode(await reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None


def _encode_custom(value: object) -> object:
    if isinstance(value, TokenIds):
        return value.packed()
    raise TypeError(f"{type(value).__name__} does not travel between processes")


def _decode_custom(type_: type, value: Any) -> object:  # noqa: ANN401
    if type_ is TokenIds:
        return TokenIds.unpack(value) if isinstance(value, bytes) else TokenIds(value)
    raise TypeError(f"{type_.__name__} does not travel between processes")


def send_payload(connection: socket.socket, payload: bytes) -> None:
    """One frame, whatever it holds. Raises OSError."""
    connection.sendall(_LENGTH.pack(len(payload)))
    connection.sendall(payload)


def receive_payload(connection: socket.socket) -> bytes | None:
    """Wait for the next frame; None when the other side is gone."""
    header = _receive_exactly(connection, _LENGTH.size)
    return header and _receive_exactly(connection, _LENGTH.unpack(header)[0])


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
