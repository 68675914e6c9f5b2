"""What will be asked and when: sessions of requests, made before the first is sent. Knows no HTTP and no server."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
# A completion's text or token ids, or what is said next in a chat: the messages before the model answers.
Prompt = str | list[int] | list[Message]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request. Its prompt is made when it is needed: those of a whole trace would not fit in memory."""

    make_prompt: Callable[[], Prompt]
    max_tokens: int
    think_time: float = 0.0  # seconds between the answer to the request before and this one


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """Requests that follow one another: each is due when the one before was answered and thought about."""

    start: float  # when the first is due in an open loop, seconds from the start of the load
    requests: tuple[PlannedRequest, ...]
    is_conversation: bool = False  # each prompt follows all that was said before, the server's own answers included


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that will be sent, in the order of the sessions' starts."""

    name: str
    sessions: Iterable[PlannedSession]
    num_requests: int | None  # of all sessions; None: a closed loop goes on until its time is over
    notes: tuple[str, ...] = ()  # for the reader of the report: what was left out or made up
