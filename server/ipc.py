"""How messages travel between the processes of the server: length-prefixed msgpack over a socket pair.

Knows no message. Never pickle: what arrives is decoded into declared types or refused. Token ids travel packed.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from server.token_ids import TokenIds

_LENGTH = struct.Struct("<I")


class MessageCodec:
    """Encodes any declared message, decodes those of one union."""

    def __init__(self, receives: object, custom: "CustomTypes | None" = None) -> None:
        """Decode messages of the type or union `receives`, with types that msgspec does not know among their fields."""
        custom = custom or CustomTypes()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=custom.encode)
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(receives, dec_hook=custom.decode)

    def encode(self, message: object) -> bytes:
        """One frame: the length of the payload as four bytes, then the payload."""
        payload = self._encoder.encode(message)
        return _LENGTH.pack(len(payload)) + payload

    def receive(self, connection: socket.socket) -> object | None:
        """Wait for the next message; None when the other side is gone."""
        header = receive_exactly(connection, _LENGTH.size)
        payload = header and receive_exactly(connection, _LENGTH.unpack(header)[0])
        return self._decoder.decode(payload) if payload else None

    async def receive_async(self, reader: asyncio.StreamReader) -> object | None:
        """The same on an event loop."""
        try:
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            return self._decoder.decode(await reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None


class CustomTypes:
    """How objects cross that are no plain values: each type with a way there and a way back."""

    def __init__(self, *ways: tuple[type, Callable[[Any], object], Callable[[Any], object]]) -> None:
        """More types, each as (type, to a plain value, from a plain value)."""
        packed = (TokenIds, TokenIds.packed, _unpack)
        self._ways = {type_: (there, back) for type_, there, back in (packed, *ways)}

    def encode(self, value: object) -> object:
        """A plain value in its place."""
        return self._way_of(type(value))[0](value)

    def decode(self, type_: type, value: object) -> object:
        """The object that the plain value stands for."""
        return self._way_of(type_)[1](value)

    def _way_of(self, type_: type) -> tuple[Callable[[Any], object], Callable[[Any], object]]:
        for known, way in self._ways.items():
            if issubclass(type_, known):
                return way
        raise NotImplementedError(f"{type_.__name__} does not travel between processes")


def _unpack(value: bytes | list[int]) -> TokenIds:
    return TokenIds.unpack(value) if isinstance(value, bytes) else TokenIds(value)


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes | None:
    """Wait for so many bytes; None when the other side is gone."""
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
