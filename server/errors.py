"""What can go wrong with a request, as exceptions that carry their own answer in OpenAI's shape. No HTTP library here.

ApiError                          status, type, code, param, message
|-- InvalidRequest            400 the request is at fault; param names the field
|   |-- ContextLengthExceeded 400 prompt and max_tokens do not fit the model's window
|   `-- BodyTooLarge          413
|-- InvalidApiKey             401
|-- PermissionDenied          403 the key does not open this route
|-- ModelNotFound             404 names another model than the one that is served
|-- RouteNotFound             404
|-- MethodNotAllowed          405
|-- InternalError             500 our fault; the log says more than the answer
`-- ServiceUnavailable        503 the engine is loading, draining or lost: try again later
"""

from collections.abc import Mapping
from typing import Any


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


class InternalError(ApiError):
    """Our fault. The answer tells nothing of the inside."""

    code = "internal_error"


class ServiceUnavailable(ApiError):
    """The engine is loading, draining or lost."""

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
