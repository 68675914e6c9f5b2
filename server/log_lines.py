"""What a log line may carry beside its sentence: fields for collectors, and the request that it belongs to.

Knows nothing of where lines go or what they look like there (see logging_setup).
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import msgspec


class RequestContext(NamedTuple):
    """The HTTP request that is being answered, and its place in a distributed trace, if it has one."""

    request_id: str
    trace_id: str | None = None  # 32 hexadecimal digits
    span_id: str | None = None  # 16; of the server's own span, or of the caller's where there is none

    def trace_fields(self) -> dict[str, str | None]:
        """Its place in a trace as fields of a line; none where it has no place."""
        return {} if self.trace_id is None else {"trace_id": self.trace_id, "span_id": self.span_id}


# Set for as long as a request is answered. Tasks and threads that are started meanwhile belong to it too.
current_request: ContextVar[RequestContext | None] = ContextVar("current_request", default=None)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A message for a logger: `logger.info(LogLine(...))`. People read its text, collectors its message and fields."""

    message: str
    fields: Mapping[str, object]  # by names other than those of LINE_FIELDS
    text: str | None = None  # None: the fields as JSON

    def __str__(self) -> str:
        """The text for people, as logging asks for it."""
        return msgspec.json.encode(self.fields).decode() if self.text is None else self.text


LINE_FIELDS = frozenset({"time", "level", "logger", "process", "message", "exception", "stack_trace"})
