"""A route that calls its function at once, for those that answer most requests. Knows no API."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute


class DirectRoute(APIRoute):
    """Its function takes the request and the edge: there is nothing for FastAPI to look for in the request."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What is called with each request."""
        endpoint = self.endpoint

        async def handle(request: Request) -> Response:
            response: Response = await endpoint(request, request.app.state.edge)
            return response

        return handle
