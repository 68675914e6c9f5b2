"""The server that is measured, and connections to it: opened when needed, kept, and used again.

Knows HTTP and TLS, and no load. The server's address is looked up once, so that no name server is measured.
"""

import asyncio
import json
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from server.load_test.connection import ClosedUnanswered, Connection, TakePiece
from server.load_test.exchange_errors import ExchangeFailed, error_text

_MOST_KEPT_BYTES = 4096  # of an answer that is no success


class BadUrl(ValueError):
    """No URL of a server; the message is for the person who gave it."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the server is."""

    host: str
    port: int
    is_tls: bool
    path: str  # before /v1/..., without a slash at its end

    @property
    def authority(self) -> str:
        """Host and port as a Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The whole, as a person would write it."""
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.path}"


def read_target(url: str) -> Target:
    """Understand a URL with or without `/v1` at its end, as different clients want it.

    Raises:
        BadUrl: it is none.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
        raise BadUrl(f"{url!r} is not the URL of a server: write one such as http://127.0.0.1:8000.")
    if parts.username is not None:
        raise BadUrl("The URL has a user's name in it, which would not be sent: give --api-key or --header.")
    for endpoint, end in (("chat", "/chat/completions"), ("completions", "/completions")):
        if parts.path.rstrip("/").endswith(end):
            server = url.rstrip("/").removesuffix(end)
            raise BadUrl(f"{url!r} is not a server but one of its routes: give --endpoint {endpoint} and {server}.")
    is_tls = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Target(parts.hostname, port or (443 if is_tls else 80), is_tls, path)


class Client:
    """Sends requests to one server."""

    def __init__(
        self, target: Target, *, timeout: float, headers: Mapping[str, str] | None = None, verifies: bool = True
    ) -> None:
        """An answer may take `timeout` seconds; `headers` go with each request; False trusts any certificate."""
        self.target = target
        self.num_sent_again = 0  # because the server had closed the kept connection meanwhile
        self._timeout = timeout
        lines = {
            "Host": target.authority,
            "User-Agent": "octavo-load-test",
            "Accept-Encoding": "identity",
            **(headers or {}),
        }
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._address: str | None = None
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._tls: ssl.SSLContext | None = None
        if target.is_tls:
            self._tls = ssl.create_default_context()
            if not verifies:
                self._tls.check_hostname = False
                self._tls.verify_mode = ssl.CERT_NONE

    async def post(self, path: str, body: bytes, take: TakePiece) -> int:
        """Send JSON and let `take` have the pieces of the answer as they come; its status.

        Raises:
            ExchangeFailed: no whole answer came.
        """
        head = (
            f"POST {self.target.path}{path} HTTP/1.1\r\n{self._headers}Content-Type: application/json\r\n"
            f"Accept: text/event-stream, application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return await self._exchange(head.encode("latin-1") + body, take)

    async def get_json(self, path: str) -> Any:  # noqa: ANN401
        """The JSON that stands at a path.

        Raises:
            ExchangeFailed: none does.
        """
        received = bytearray()
        head = f"GET {self.target.path}{path} HTTP/1.1\r\n{self._headers}Accept: application/json\r\n\r\n"
        status = await self._exchange(head.encode("latin-1"), lambda _status, _type, _now, data: received.extend(data))
        if status != 200:
            raise ExchangeFailed(f"http {status}", error_text(bytes(received[:_MOST_KEPT_BYTES])))
        try:
            return json.loads(received)
        except ValueError as error:
            raise ExchangeFailed("bad answer", f"{path} answered no JSON: {error}") from None

    def close(self) -> None:
        """Close all connections."""
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._idle.clear()

    async def _exchange(self, request: bytes, take: TakePiece) -> int:
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    connection = self._idle_connection() or await self._connect()
                    try:
                        return await self._send(connection, request, take)
                    except ClosedUnanswered:
                        self.num_sent_again += 1
        except TimeoutError:
            raise ExchangeFailed("timeout", f"no whole answer came within {self._timeout:g} s") from None

    async def _send(self, connection: Connection, request: bytes, take: TakePiece) -> int:
        try:
            status = await connection.send(request, take)
        except BaseException:  # a timeout and a cancellation too: the rest of the answer must not meet the next request
            self._open.discard(connection)
            connection.close()
            raise
        if connection.is_reusable and connection.is_open:
            self._idle.append(connection)
        else:
            self._open.discard(connection)
            connection.close()
        return status

    def _idle_connection(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()  # the one used last: it is the least likely to have been closed
            if connection.is_open:
                return connection
            self._open.discard(connection)
        return None

    async def _connect(self) -> Connection:
        try:
            if self._address is None:
                connection = await self._look_up()
            else:
                connection = await self._connect_to(self._address)
        except OSError as error:
            raise ExchangeFailed("connect", f"{self.target.url} cannot be reached: {error}") from None
        self._open.add(connection)
        return connection

    async def _look_up(self) -> Connection:
        """Connect to the first of the host's addresses at which the server listens, and remember it."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self.target.host, self.target.port, type=socket.SOCK_STREAM)
        failure = OSError("its name has no address")
        for _, _, _, _, (address, *_) in found:
            try:
                connection = await self._connect_to(str(address))
            except OSError as error:
                failure = error
            else:
                self._address = str(address)
                return connection
        raise failure

    async def _connect_to(self, address: str) -> Connection:
        loop = asyncio.get_running_loop()
        server_name = self.target.host if self._tls else None
        _, connection = await loop.create_connection(
            Connection, address, self.target.port, ssl=self._tls, server_hostname=server_name
        )
        return connection
