"""A response of JSON that may be large, sent in pieces: one write of megabytes holds the event loop for too long.

Knows no API.
"""

from collections.abc import Mapping, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_MAX_WRITE = 1 << 18  # bytes: some 0.1 ms


class JsonResponse(Response):
    """Pieces of one JSON document, with its whole length in the head."""

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes], headers: Mapping[str, str] | None = None) -> None:
        """Put together, the pieces are the document."""
        self._pieces = pieces
        self.status_code = 200
        self.background = None
        self.init_headers({"content-length": str(sum(map(len, pieces))), **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it, as fast as the client takes it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            for start in range(0, len(piece), _MAX_WRITE):
                part = piece[start : start + _MAX_WRITE]
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
