"""One HTTP/1.1 connection on which requests are sent one after another. Notes when each piece of an answer came.

Made to take little from the processors that it may share with the server: httptools parses, nothing is copied twice.
Knows no JSON and no pool.
"""

import asyncio
import time
from collections.abc import Callable
from typing import cast

import httptools

from server.load_test.exchange_errors import ExchangeFailed

# Takes status, content type, time of arrival (time.perf_counter()), and a piece of the body.
TakePiece = Callable[[int, str, float, bytes], None]


class ClosedUnanswered(Exception):
    """The server closed a connection that had been kept open before a byte of the answer came.

    It may have done so before the request reached it, so that the request can be sent on a new connection.
    """


class Connection(asyncio.Protocol):
    """Open until either side closes it; takes a request when the one before was answered."""

    def __init__(self) -> None:
        """Not connected yet: the event loop does that."""
        self.is_reusable = False  # kept open by the server after the last answer
        self.num_answers = 0
        self._transport: asyncio.WriteTransport | None = None
        self._answer: _Answer | None = None
        self._failure: Exception | None = None

    def send(self, request: bytes, take: TakePiece) -> "asyncio.Future[int]":
        """Write a request. The future becomes the answer's status when all of it came.

        It raises ExchangeFailed, or ClosedUnanswered where nothing came on a connection that was used before.
        """
        assert self._transport is not None and self._answer is None, "a connection carries one request at a time"
        self.is_reusable = False
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._answer = _Answer(take, done)
        if self._transport.is_closing():
            self.connection_lost(self._failure)
        else:
            self._transport.write(request)
        return done

    def close(self) -> None:
        """End it; an answer that is on its way is given up."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_open(self) -> bool:
        """Whether neither side has closed it, as far as is known."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio's."""
        # uvloop's transports are asyncio's by their methods, not by their classes.
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Asyncio's."""
        answer = self._answer
        if answer is None:  # bytes that nobody asked for
            self.close()
            return
        answer.now = time.perf_counter()
        try:
            answer.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ExchangeFailed("bad answer", f"the server answered something that is not HTTP: {error}"))
            self.close()
            return
        if answer.encoding not in ("", "identity"):
            self._end(ExchangeFailed("bad answer", f"it is compressed ({answer.encoding}), which nobody asked for"))
            self.close()
        elif answer.is_complete:
            self.is_reusable = answer.is_reusable
            self._end(answer.redirection())

    def connection_lost(self, failure: Exception | None) -> None:
        """Asyncio's."""
        self._failure = failure
        answer = self._answer
        if answer is None:
            return
        if answer.status and answer.ends_with_connection and failure is None:
            self._end(None)
        elif not answer.status and self.num_answers and not answer.now:
            self._end(ClosedUnanswered())
        else:
            reason = f": {failure}" if failure else ""
            where = "during" if answer.status else "before"
            self._end(ExchangeFailed("broken off", f"the connection ended {where} the answer{reason}"))

    def _end(self, failure: Exception | None) -> None:
        answer, self._answer = self._answer, None
        assert answer is not None
        if answer.done.done():  # nobody waits any more
            return
        if failure is not None:
            answer.done.set_exception(failure)
        else:
            self.num_answers += 1
            answer.done.set_result(answer.status)


class _Answer:
    """Listens to the parser of one answer."""

    def __init__(self, take: TakePiece, done: "asyncio.Future[int]") -> None:
        self.take = take
        self.done = done
        self.now = 0.0  # of the packet that is being read
        self.status = 0  # the headers have not all come
        self.content_type = ""
        self.encoding = ""  # of the body
        self.location = ""  # where a redirection leads
        self.ends_with_connection = True
        self.is_complete = False
        self.is_reusable = False  # asked at the end of the message, after which the parser has forgotten it
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self.content_type = value.decode("latin-1").partition(";")[0].strip().lower()
        elif name == b"content-encoding":
            self.encoding = value.decode("latin-1").strip().lower()
        elif name == b"location":
            self.location = value.decode("latin-1")
        elif name in (b"content-length", b"transfer-encoding"):
            self.ends_with_connection = False

    def redirection(self) -> ExchangeFailed | None:
        """Whether the answer only names another address: what was asked stays unanswered."""
        if not (300 <= self.status < 400 and self.location):
            return None
        return ExchangeFailed(f"http {self.status}", f"the server says to ask {self.location}")

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        self.status = 0 if status < 200 else status  # 100 Continue and its like come before an answer

    def on_body(self, data: bytes) -> None:
        self.take(self.status, self.content_type, self.now, data)

    def on_message_complete(self) -> None:
        self.is_complete = self.status != 0
        self.is_reusable = self.parser.should_keep_alive()
