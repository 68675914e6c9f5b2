"""Turns every exception that reaches the edge of the application into an answer in the shape of the API asked.

That is OpenAI's, and Anthropic's under its own path.
"""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from server.disconnect import ClientDisconnected
from server.engine_errors import EngineDied, EngineUnavailable, RequestDropped, RequestRejected
from server.errors import (
    ApiError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    RouteNotFound,
    ServiceUnavailable,
    TooManyRequests,
    whole_seconds,
)
from server.protocol.fields import explain
from server.protocol.messages_answers import error_body, error_status, is_messages_path
from server.protocol.responses import to_json

logger = logging.getLogger("octavo.edge")

CLIENT_CLOSED_REQUEST = 499  # nginx's number, for logs and metrics only: nobody is there to read it


def as_api_error(error: Exception) -> ApiError:
    """The answer to whatever went wrong. What nobody foresaw is logged here, and the caller learns nothing of it."""
    match error:
        case ApiError():
            return error
        case RequestRejected():
            return InvalidRequest(str(error), error.param)
        case RequestDropped():
            return _dropped(error)
        case EngineDied():
            return ServiceUnavailable(str(error), "engine_died")
        case EngineUnavailable():
            return ServiceUnavailable(str(error), "engine_unavailable")
        case _:
            logger.error("A request failed.", exc_info=error)
            return InternalError("The server failed on this request; its log says why.")


def _dropped(error: RequestDropped) -> ApiError:
    """A full queue is the callers' to avoid; a long one the server's fault; a deadline is what was agreed."""
    match error.cause:
        case "queue_full":
            return TooManyRequests(str(error), error.cause, error.retry_after)
        case "queue_timeout":
            return ServiceUnavailable(str(error), error.cause, whole_seconds(error.retry_after))
        case "deadline":
            return DeadlineExceeded(str(error))


def error_response(error: Exception, path: str = "") -> Response:
    """The HTTP response for an exception, in the shape of the API that `path` belongs to."""
    answer = as_api_error(error)
    body, status = answer.body(), answer.status
    if is_messages_path(path):
        body, status = error_body(answer), error_status(answer)
    return Response(to_json(body), status, dict(answer.headers), "application/json")


def add_error_handlers(app: FastAPI) -> None:
    """Let `app` answer every error in the same shape."""

    async def answer(request: Request, error: Exception) -> Response:
        return error_response(error, request.url.path)

    async def answer_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        if error.status_code == MethodNotAllowed.status:
            response = error_response(MethodNotAllowed(f"{path[:256]} does not take {request.method}."), path)
        elif error.status_code == RouteNotFound.status:
            response = error_response(RouteNotFound(f"There is nothing at {path[:256]}."), path)
        else:
            response = error_response(InvalidRequest(str(error.detail)), path)
            response.status_code = error.status_code
        response.headers.update(error.headers or {})
        return response

    async def answer_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        details: ErrorDetails = error.errors()[0]
        _, *loc = details["loc"]  # after where the field stands: in the query
        return error_response(explain({**details, "loc": tuple(loc)}), request.url.path)

    async def give_up(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    for disconnected in (ClientDisconnected, ClientDisconnect):
        app.add_exception_handler(disconnected, give_up)
    for expected in (ApiError, EngineUnavailable, EngineDied, RequestDropped, RequestRejected):
        app.add_exception_handler(expected, answer)
