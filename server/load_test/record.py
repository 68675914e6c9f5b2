"""What became of one request, in seconds from the start of the load. Counts latency from when the request was due."""

from array import array
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True, eq=False)
class Record:
    """One request. What never happened is None."""

    session: int
    turn: int
    due: float  # when it should have been sent
    max_tokens: int
    sent: float | None = None  # when it was: handed to the connection, or the connection began to be made
    ended: float | None = None  # when the answer was whole, or failed
    piece_times: "array[float]" = field(default_factory=lambda: array("d"))  # of each event that brought text
    num_prompt_tokens: int | None = None  # by the server's count
    num_cached_tokens: int | None = None  # of the prompt
    num_counted_tokens: int | None = None  # of the answer, by the server's count
    finish_reason: str | None = None
    error_kind: str | None = None  # see exchange_errors.py; "unsent" where the turn before it failed
    error_message: str | None = None

    @property
    def is_answered(self) -> bool:
        """Whether a whole answer came."""
        return self.error_kind is None and self.ended is not None

    @property
    def num_output_tokens(self) -> int:
        """Tokens that came, by the server's count, or else the pieces of text."""
        return len(self.piece_times) if self.num_counted_tokens is None else self.num_counted_tokens

    @property
    def lateness(self) -> float | None:
        """Seconds by which the client itself was late to send, a wait for --max-concurrency included."""
        return None if self.sent is None else self.sent - self.due

    @property
    def ttft(self) -> float | None:
        """Seconds from when it was due to the first text."""
        return self.piece_times[0] - self.due if self.piece_times else None

    @property
    def end_to_end(self) -> float | None:
        """Seconds from when it was due to the end of its answer."""
        return self.ended - self.due if self.ended is not None and self.is_answered else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one piece of text and the next."""
        return [later - earlier for earlier, later in pairwise(self.piece_times)]

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for answers of one token."""
        if len(self.piece_times) < 2 or self.num_output_tokens < 2:
            return None
        return (self.piece_times[-1] - self.piece_times[0]) / (self.num_output_tokens - 1)
