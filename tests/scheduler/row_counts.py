"""What the rows of a sequence computed, counted apart from the scheduler: its own books must say the same."""

from dataclasses import dataclass

from scheduler.output import KnownRow, NewRow


@dataclass
class RowCounts:
    """What the rows of one sequence computed, as they were scheduled."""

    start: int  # tokens that it had when it was first scheduled: cached ones, or those of the sequence it forked from
    was_preempted: bool = False  # before that
    end: int = 0  # tokens that it has had in the cache at most
    num_recomputed: int = 0  # tokens that were computed, and that it had had there before

    def add(self, row: NewRow | KnownRow) -> None:
        self.num_recomputed += max(0, min(self.end, row.end) - row.num_computed_tokens)
        self.end = max(self.end, row.end)
