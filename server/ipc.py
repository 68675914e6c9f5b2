"""How messages travel between the processes of the server: length-prefixed msgpack over a socket pair.

Knows no message. Never pickle: what arrives is decoded into declared types or refused. Token ids travel packed.
"""

import socket
import struct
from collections.abc import Iterator
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
        return self.decode(payload) if payload else None

    def decode(self, payload: bytes | memoryview) -> object:
        """The message of a frame's payload."""
        return self._decoder.decode(payload)


class Frames:
    """Puts frames together again from the pieces in which they arrive."""

    def __init__(self) -> None:
        """Nothing has come."""
        self._begun = bytearray()  # of a frame that is not complete

    def take(self, data: bytes) -> Iterator[memoryview]:
        """The payloads of the frames that are complete with `data`, each to be used before the next is asked for."""
        if self._begun:
            self._begun += data
            data = bytes(self._begun) if self._is_complete() else b""
            if data:
                self._begun.clear()
        view, start = memoryview(data), 0
        while len(view) - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(view, start)[0]
            if end > len(view):
                break
            yield view[start + _LENGTH.size : end]
            start = end
        self._begun += view[start:]

    def _is_complete(self) -> bool:
        begun = self._begun
        return len(begun) >= _LENGTH.size and len(begun) >= _LENGTH.size + _LENGTH.unpack_from(begun)[0]


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
