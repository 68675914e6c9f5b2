"""Bounds what the server holds at once of requests and of their bodies, before anything of a body is read.

What it keeps out costs next to nothing, so that no burst takes the memory of those who are inside. The queue behind it
is the scheduler's, which is bounded too, and fairer. Plain ASGI. Must not know what a request asks for.
"""

from collections import Counter
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.error_responses import error_response
from server.errors import BodyTooLarge, TooManyRequests

_SHARE = 4  # a key may hold this many times what is free


class BoundedShares:
    """An amount that several holders share, none of whom can take it all.

    Where `keeps_room`, a holder may have at most four times what is free: alone four fifths of the whole, two of them
    four ninths each, so that there is always something left for one who holds less (the dynamic thresholds of
    Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", IEEE/ACM ToN 1998).
    """

    def __init__(self, limit: int, *, keeps_room: bool) -> None:
        """Nothing is held."""
        self._limit = limit
        self._keeps_room = keeps_room
        self._held: Counter[str] = Counter()
        self._num_held = 0

    @property
    def most(self) -> int:
        """What one holder may have where nobody else has anything."""
        return self._limit * _SHARE // (_SHARE + 1) if self._keeps_room else self._limit

    def take(self, holder: str, amount: int) -> bool:
        """Take some; false, and nothing taken, where it is too much."""
        num_free = self._limit - self._num_held - amount
        if num_free < 0 or (self._keeps_room and self._held[holder] > _SHARE * num_free):
            return False
        self._held[holder] += amount
        self._num_held += amount
        return True

    def give_back(self, holder: str, amount: int) -> None:
        """End the holding of some."""
        self._num_held -= amount
        self._held[holder] -= amount
        if not self._held[holder]:
            del self._held[holder]


class LoadGate:
    """Lets as many requests in as may be open at once."""

    def __init__(
        self,
        app: ASGIApp,
        max_requests: int,
        max_bytes: int,
        *,
        has_keys: bool,
        retry_after: Callable[[], float | None],
    ) -> None:
        """Stand before `app`.

        Args:
            app: the rest of the application.
            max_requests: that are open at once.
            max_bytes: of all their bodies.
            has_keys: requests are told apart by the names of their keys, of which none can take all the room.
            retry_after: seconds after which there should be room, if anybody knows.
        """
        self._app = app
        self._requests = BoundedShares(max_requests, keeps_room=has_keys)
        self._bytes = BoundedShares(max_bytes, keeps_room=has_keys)
        self._retry_after = retry_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 429. What has no body asks for no work, and passes."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        holder = scope["state"].get("key_name") or ""
        if not self._requests.take(holder, 1):
            refusal = self._refusal("The server has as many open requests as it can hold.", "too_many_open_requests")
            await error_response(refusal, scope["path"])(scope, receive, send)
            return
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            size = len(message.get("body", b""))
            if size and not self._bytes.take(holder, size):
                if num_bytes + size > self._bytes.most:  # it would find no room however often it was sent again
                    raise BodyTooLarge(
                        f"The body is larger than the {self._bytes.most} bytes that this server has room for."
                    )
                raise self._refusal(
                    "The bodies of open requests take all the memory that there is for them.", "too_many_open_bytes"
                )
            num_bytes += size
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._requests.give_back(holder, 1)
            self._bytes.give_back(holder, num_bytes)

    def _refusal(self, message: str, code: str) -> TooManyRequests:
        return TooManyRequests(message, code, self._retry_after())
