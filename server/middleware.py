"""What happens to every HTTP request, whatever its route: a request id, the key, a log line and its metrics.

Plain ASGI, so that streams and disconnects pass through untouched. Must not know what a request asks for.
"""

import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.error_responses import CLIENT_CLOSED_REQUEST, error_response
from server.errors import InternalError, InvalidApiKey
from server.metrics import ServerMetrics
from server.protocol.messages_answers import is_messages_path

LIVENESS_PATH = "/health/live"
REQUEST_ID_HEADER = "x-request-id"
MESSAGES_REQUEST_ID_HEADER = "request-id"  # as Anthropic's clients look for it
_USABLE_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_UNMATCHED = "unmatched"
_QUIET_PREFIXES = ("/health", "/metrics")

access_logger = logging.getLogger("octavo.access")


class ApiKeys:
    """Lets only those pass who bring one of the keys. Without keys, everyone."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        """`keys` are compared as bytes, in constant time."""
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] != "http" or not self._keys or scope["path"] == LIVENESS_PATH or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        error = InvalidApiKey("The Authorization header must carry a valid key: Bearer <key>.")
        answer = error_response(error, scope["path"])
        await answer(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        # Every key is compared, so that the time tells nothing about which one is close.
        matches = [hmac.compare_digest(given.strip().encode("latin-1"), key) for key in self._keys]
        return any(matches)


class Observation:
    """Gives each request an id, answers what nobody has answered, logs it, and counts it."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        """Record into `metrics`."""
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and watch its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _USABLE_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        status = CLIENT_CLOSED_REQUEST  # until an answer begins

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = request_id
                if is_messages_path(scope["path"]):
                    headers[MESSAGES_REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if status != CLIENT_CLOSED_REQUEST:  # too late for an answer; the server closes the connection
                raise
            await error_response(error, scope["path"])(scope, receive, send_with_id)
            status = InternalError.status
        finally:
            self._record(scope, status, time.perf_counter() - started, request_id)

    def _record(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        handler = getattr(scope.get("route"), "path", _UNMATCHED)
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        self._metrics.observe_http(handler, method, status, seconds)
        level = logging.DEBUG if handler.startswith(_QUIET_PREFIXES) else logging.INFO
        path = scope["path"][:256].encode("unicode_escape").decode("ascii")  # a line break in a path stays in its line
        access_logger.log(level, "%s %s %d %.1f ms id=%s", method, path, status, seconds * 1000, request_id)
