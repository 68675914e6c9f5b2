"""What happens to every HTTP request, whatever its route: a request id, the key, a log line and its metrics.

Plain ASGI, so that streams and disconnects pass through untouched. Must not know what a request asks for.
"""

import logging
import re
import time
import uuid
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api_keys import KeyHolder, KeyRing
from server.dashboard.paths import DASHBOARD_PATH, is_data_path, is_page_path
from server.error_responses import CLIENT_CLOSED_REQUEST, error_response
from server.errors import ApiError, InternalError, InvalidApiKey, PermissionDenied
from server.http_metrics import METHODS, OTHER_METHOD, UNMATCHED, HttpRecord
from server.http_protocol import chunk_writer
from server.log_lines import LogLine, RequestContext, current_request
from server.metrics import ServerMetrics
from server.protocol.messages_answers import is_messages_path
from server.request_history import RequestHistory

if TYPE_CHECKING:
    from server.tracing import RequestSpan, Tracing

LIVENESS_PATH = "/health/live"
# Open to everyone, since kubelets and load balancers cannot send a key: they tell a word about the server, and no more.
HEALTH_PATHS = frozenset({"/health", "/health/ready", LIVENESS_PATH})
REQUEST_ID_HEADER = "x-request-id"
MESSAGES_REQUEST_ID_HEADER = "request-id"  # as Anthropic's clients look for it
_USABLE_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
ADMIN_PATHS = frozenset({"/metrics"})
_PLAIN_IN_PATHS = "/:@!$&()*+,;=~"  # beside letters and digits
_QUIET_PREFIXES = ("/health", "/metrics", "/v1/requests/", DASHBOARD_PATH)  # asked all the time

access_logger = logging.getLogger("octavo.access")
request_log = logging.getLogger("octavo.requests")


class ApiKeys:
    """Lets only those pass who bring one of the keys, and tells the application whose it is, never the key itself."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        """Without keys everyone passes."""
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 403. The holder's name is in the scope's state, as `key_name`."""
        if scope["type"] != "http" or (path := _route_path(scope)) in HEALTH_PATHS or is_page_path(path):
            await self._app(scope, receive, send)
            return
        key = _given_key(Headers(scope=scope), path)
        holder = None if key is None else self._keys.holder(key)
        scope.setdefault("state", {})["key_name"] = None if holder is None else holder.name
        refusal = self._refusal(holder, path)
        await (self._app if refusal is None else error_response(refusal, path))(scope, receive, send)

    def _refusal(self, holder: KeyHolder | None, path: str) -> ApiError | None:
        for_admin = self._keys.has_admin_key and (path in ADMIN_PATHS or is_data_path(path))
        if holder is None and (for_admin or not self._keys.is_open):
            return InvalidApiKey("The Authorization header must carry a valid key: Bearer <key>.")
        if for_admin and holder is not None and not holder.is_admin:
            return PermissionDenied(f"{path} is only for the holder of the admin key.")
        if is_data_path(path) and not (self._keys.is_open or self._keys.has_admin_key):
            return PermissionDenied(
                "The dashboard shows the requests of every key, so it needs an admin key: "
                "start the server with --admin-api-key, and enter that key here."
            )
        return None


def takes_x_api_key(path: str) -> bool:
    """Clients of Anthropic's API ask here, and send their key in a header of its own."""
    return path.startswith(("/v1/messages", "/v1/models"))


def _given_key(headers: Headers, path: str) -> bytes | None:
    """The key of a request."""
    authorization = headers.get("authorization")
    if authorization is None and takes_x_api_key(path):
        key = headers.get("x-api-key")
        return None if key is None else key.strip().encode("latin-1")
    scheme, _, given = (authorization or "").partition(" ")
    return given.strip().encode("latin-1") if scheme.lower() == "bearer" else None


def _route_path(scope: Scope) -> str:
    """The path that routes are matched against: without what a proxy puts before it, whether or not it is left in."""
    path, prefix = scope["path"], scope.get("root_path", "")
    return path.removeprefix(prefix) if prefix and path.startswith(f"{prefix}/") else path


class RequestLog:
    """Logs the bodies of requests, for operators who ask for it: they hold the callers' prompts."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        """Log at most `max_bytes` of each."""
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and log what of its body was read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        kept = bytearray()
        num_bytes = 0

        async def receive_and_keep() -> Message:
            nonlocal num_bytes
            message = await receive()
            body = message.get("body", b"")
            kept.extend(body[: self._max_bytes - len(kept)])
            num_bytes += len(body)
            return message

        try:
            await self._app(scope, receive_and_keep, send)
        finally:
            if num_bytes:
                request_log.info(_body_line(scope["state"]["request_id"], bytes(kept), num_bytes))


def _body_line(request_id: str, kept: bytes, num_bytes: int) -> LogLine:
    body = kept.decode("utf-8", "backslashreplace")
    escaped = body.encode("unicode_escape").decode("ascii")  # a line break in it stays in its line
    fields = {"request_id": request_id, "num_bytes": num_bytes, "body": body, "is_cut": len(kept) < num_bytes}
    return LogLine("The body of a request.", fields, f"id={request_id} {num_bytes} bytes: {escaped}")


class Observation:
    """Gives each request an id, answers what nobody has answered, logs it, and counts it."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        history: RequestHistory,
        root_path: str = "",
        tracing: "Tracing | None" = None,
    ) -> None:
        """Record into `metrics` and `history`, and into spans where there is `tracing`.

        `root_path` is what a proxy puts before our paths, be it still there or not.
        """
        self._app = app
        self._metrics = metrics
        self._history = history
        self._root_path = root_path
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and watch its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        scope["root_path"] = self._root_path or scope.get("root_path", "")
        span = self._begin_span(scope)
        context = _request_context(Headers(scope=scope), span)
        request_id = context.request_id
        token = current_request.set(context)
        scope.setdefault("state", {}).update(request_id=request_id, span=span)
        status = CLIENT_CLOSED_REQUEST  # until an answer begins
        num_received = num_sent = 0  # bytes of the two bodies; what a head declares need not be true

        async def receive_and_count() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status, num_sent
            num_sent += len(message.get("body", b""))
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = request_id
                if is_messages_path(scope["path"]):
                    headers[MESSAGES_REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive_and_count, send_with_id)
        except Exception as error:
            if status != CLIENT_CLOSED_REQUEST:  # too late for an answer; the server closes the connection
                if span is not None:
                    span.fail(type(error).__name__)
                raise
            await error_response(error, scope["path"])(scope, receive, send_with_id)
            status = InternalError.status
        finally:
            seconds = time.perf_counter() - started
            self._record(scope, status, seconds, request_id, num_received, num_sent)
        current_request.reset(token)  # not after an error: what the server below says of it belongs to the request too

    def _begin_span(self, scope: Scope) -> "RequestSpan | None":
        if self._tracing is None or _route_path(scope).startswith(_QUIET_PREFIXES):
            return None
        return self._tracing.begin(scope)

    def _record(
        self, scope: Scope, status: int, seconds: float, request_id: str, num_received: int, num_sent: int
    ) -> None:
        handler = getattr(scope.get("route"), "path", UNMATCHED)
        method = scope["method"] if scope["method"] in METHODS else OTHER_METHOD
        writer = chunk_writer(scope)  # of what bypasses `send`
        num_sent += 0 if writer is None else writer.num_bytes
        self._metrics.http.observe(HttpRecord(handler, method, status, seconds, num_received, num_sent))
        level = logging.DEBUG if handler.startswith(_QUIET_PREFIXES) else logging.INFO
        path = quote(scope["path"][:256], _PLAIN_IN_PATHS, errors="replace")  # no space in it begins another field
        key_name = scope["state"].get("key_name")
        holder = "" if key_name is None else f" key={key_name}"
        trace = scope["state"].get("trace")
        span = scope["state"]["span"]
        if span is not None:
            span.answer(None if handler == UNMATCHED else handler, status)
            if trace is None:
                span.end()
        if trace is not None:
            self._history.close(trace, status)
        if access_logger.isEnabledFor(level):
            told = f"{method} {path} {status} {1000 * seconds:.1f} ms"
            fields = {
                "request_id": request_id,
                "id": None if trace is None else trace.answer_id,
                "key": key_name,
                "client": (scope.get("client") or (None,))[0],
                "method": method,
                "path": scope["path"][:256],
                "route": handler,
                "status": status,
                "seconds": round(seconds, 6),
            }
            access_logger.log(level, LogLine(told, fields, f"{told} id={request_id}{holder}"))


def _request_context(headers: Headers, span: "RequestSpan | None") -> RequestContext:
    """The id that the caller gave, or a new one; the span, or else the caller's (W3C Trace Context, section 3.2)."""
    given = headers.get(REQUEST_ID_HEADER, "")
    request_id = given if _USABLE_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    if span is not None:
        return RequestContext(request_id, span.trace_id, span.span_id)
    parent = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return RequestContext(request_id) if parent is None else RequestContext(request_id, parent[1], parent[2])
