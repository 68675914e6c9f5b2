"""The service level that users are promised, and whether one request was served so. Knows no load."""

from dataclasses import dataclass

from server.load_test.record import Record


@dataclass(frozen=True, slots=True)
class Objective:
    """Most seconds that each may take; None: any time will do."""

    ttft: float | None = None  # to the first text
    tpot: float | None = None  # per token after the first, on average
    itl: float | None = None  # between any two pieces of text of the answer
    end_to_end: float | None = None

    def __bool__(self) -> bool:
        """Whether anything is promised."""
        return any(limit is not None for limit in (self.ttft, self.tpot, self.itl, self.end_to_end))

    def is_kept(self, record: Record) -> bool:
        """Whether the request was answered, and all of it in time. A request that failed was not served."""
        if not record.is_answered:
            return False
        longest_gap = max(record.gaps, default=None) if self.itl is not None else None
        return (
            _within(record.ttft, self.ttft, without=False)
            and _within(record.tpot, self.tpot, without=True)
            and _within(longest_gap, self.itl, without=True)
            and _within(record.end_to_end, self.end_to_end, without=False)
        )

    def describe(self) -> str:
        """For a person."""
        parts = {
            "first token": self.ttft,
            "per token": self.tpot,
            "any gap": self.itl,
            "whole answer": self.end_to_end,
        }
        return ", ".join(f"{name} within {limit:g} s" for name, limit in parts.items() if limit is not None)


def _within(seconds: float | None, limit: float | None, *, without: bool) -> bool:
    """`without`: what a request counts as that has no such time; one token has no gap, and keeps any limit of gaps."""
    if limit is None:
        return True
    return without if seconds is None else seconds <= limit
