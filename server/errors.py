"""What can go wrong with a request, as exceptions that carry their own answer in OpenAI's shape. No HTTP library here.

ApiError                          status, type, code, param, message
|-- InvalidRequest            400 the request is at fault; param names the field
|   |-- ContextLengthExceeded 400 prompt and max_tokens do not fit the model's window
|   `-- BodyTooLarge          413
|-- InvalidApiKey             401
|-- PermissionDenied          403 the key does not open this route
|-- ModelNotFound             404 names another model than the one that is served
|-- RequestNotFound           404 no request of this id that the key may see
|-- RouteNotFound             404
|-- MethodNotAllowed          405
|-- TooManyRequests           429 there is no room for one more: try again later
|-- InternalError             500 our fault; the log says more than the answer
|-- ServiceUnavailable        503 the engine is loading, draining, lost or overloaded: try again later
`-- DeadlineExceeded          504 the answer was not complete in the time that it may take
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

_MAX_RETRY_SECONDS = 3600


class ApiError(Exception):
    """An answer that is not a success."""

    status = 500
    type = "internal_server_error"
    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        """`message` is a sentence for the caller; `param` the field at fault, in the way Python would reach it."""
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def headers(self) -> Mapping[str, str]:
        """HTTP headers that belong to this answer."""
        return {}

    def body(self) -> dict[str, Any]:
        """The body that OpenAI's clients understand."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(ApiError):
    """The request is at fault."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and max_tokens do not fit the model's window."""

    code = "context_length_exceeded"


class BodyTooLarge(InvalidRequest):
    """The body is over the limit, and was not read to its end."""

    status = 413
    code = "request_too_large"


class InvalidApiKey(ApiError):
    """The key is missing or wrong."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    @property
    def headers(self) -> Mapping[str, str]:
        """The scheme that is expected."""
        return {"WWW-Authenticate": "Bearer"}


class PermissionDenied(ApiError):
    """The key is good, and does not open this."""

    status = 403
    type = "permission_error"
    code = "permission_denied"


class ModelNotFound(ApiError):
    """The request names a model that is not served."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class RequestNotFound(ApiError):
    """No request of this id is remembered that the key may see."""

    status = 404
    type = "invalid_request_error"
    code = "request_not_found"


class RouteNotFound(ApiError):
    """There is nothing at this path."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(ApiError):
    """The path exists, but not for this method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class TooManyRequests(ApiError):
    """There is no room for one more."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, code: str, retry_after: float | None = None) -> None:
        """`code` tells the reasons apart for programs; `retry_after` in seconds, by measured throughput."""
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after

    @property
    def headers(self) -> Mapping[str, str]:
        """When to come again."""
        return {"Retry-After": str(whole_seconds(self.retry_after))}


class InternalError(ApiError):
    """Our fault. The answer tells nothing of the inside."""

    code = "internal_error"


class ServiceUnavailable(ApiError):
    """The engine is loading, draining, lost or overloaded."""

    status = 503
    type = "service_unavailable"

    def __init__(self, message: str, code: str, retry_after: int = 1) -> None:
        """`code` tells the reasons apart for programs; `retry_after` in seconds."""
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after

    @property
    def headers(self) -> Mapping[str, str]:
        """When to come again."""
        return {"Retry-After": str(self.retry_after)}


class DeadlineExceeded(ApiError):
    """The answer was not complete in the time that it may take."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"

    @property
    def headers(self) -> Mapping[str, str]:
        """The clients of OpenAI and Anthropic would send it again on their own, with its time long over."""
        return {"x-should-retry": "false"}


def whole_seconds(seconds: float | None) -> int:
    """A time to wait as Retry-After takes it: at least 1, and no more than an hour."""
    return 1 if seconds is None else max(1, min(_MAX_RETRY_SECONDS, ceil(seconds)))
