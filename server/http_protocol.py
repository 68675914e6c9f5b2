"""uvicorn's HTTP protocol with a limit on the head of a request, and errors in OpenAI's shape below the application.

httptools collects a header of any size before it hands it over, so the bytes are counted as they arrive.
"""

from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import InvalidRequest
from server.protocol.responses import to_json


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes the connection of a client whose request line and headers never end."""

    max_head_bytes: ClassVar[int] = 64 * 1024

    _head_bytes = 0
    _reading_head = False

    def data_received(self, data: bytes) -> None:
        """Parse, then count what was parsed as part of a head."""
        super().data_received(data)
        if self._reading_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes:
                self._refuse(431, "Request Header Fields Too Large", "The request's headers are too large.")

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._head_bytes = 0
        self._reading_head = True

    def on_headers_complete(self) -> None:
        """A head ends."""
        self._reading_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP."""
        self._refuse(400, "Bad Request", msg)

    def _refuse(self, status: int, reason: str, message: str) -> None:
        body = to_json(InvalidRequest(message).body())
        head = (
            f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()
