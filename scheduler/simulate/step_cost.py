"""What a step takes: the work in a SchedulerOutput, and models that turn it into seconds.

Knows no scheduler state and no clock; a fitted model comes from benchmarks/step_cost_model.py, hardware.py derives
one from a card's data sheet.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from scheduler.output import SchedulerOutput


@dataclass(slots=True)
class StepWork:
    """What a step asks of the device, in the counts that its time depends on."""

    num_rows: int = 0
    num_tokens: int = 0
    num_context_tokens: int = 0  # whose keys and values are read, over all rows: a row's tokens after the step
    num_attention_pairs: float = 0.0  # (query token, key token), in rows of more than one token
    num_copied_blocks: int = 0
    num_swapped_blocks: int = 0  # in both directions

    @classmethod
    def of(cls, output: SchedulerOutput) -> "StepWork":
        """Count what a step does."""
        num_tokens = num_context = 0
        num_pairs = 0.0
        for row in output.rows:
            num_new = row.num_new_tokens
            end = row.num_computed_tokens + num_new
            num_tokens += num_new
            num_context += end
            if num_new > 1:
                num_pairs += num_new * (end - (num_new - 1) / 2)  # causal: each sees itself and all before it
        return cls(
            len(output.rows),
            num_tokens,
            num_context,
            num_pairs,
            len(output.block_copies),
            len(output.swapped_out) + len(output.swapped_in),
        )


class StepCost(Protocol):
    """A model of the device and the host together."""

    @property
    def seconds_per_prefill_token(self) -> float:
        """What recomputing a preempted sequence costs for each of its tokens."""

    @property
    def seconds_per_swapped_block(self) -> float:
        """What swapping it costs for each of its blocks, one way."""

    def seconds(self, work: StepWork) -> float:
        """From the beginning of a step to the moment that its tokens are known."""

    def describe(self) -> str:
        """What was modelled, for the reader of a report."""


@dataclass(frozen=True, slots=True)
class NoCost:
    """Steps take no time: every request is answered before the next one arrives."""

    seconds_per_prefill_token: float = 0.0
    seconds_per_swapped_block: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """Nothing."""
        return 0.0

    def describe(self) -> str:
        """For the report."""
        return "steps take no time"


@dataclass(frozen=True, slots=True)
class FittedCost:
    """A sum of terms, each fitted to measured steps; all are 0 or more.

    The weights of a model are read once a step, whatever its tokens: seconds grow with tokens in a bent line, which
    `seconds_by_tokens` holds as (tokens, seconds) points, straight in between and beyond.
    """

    source: str
    seconds_by_tokens: tuple[tuple[int, float], ...]
    per_row: float
    per_context_token: float
    per_attention_pair: float
    per_copied_block: float = 0.0
    per_swapped_block: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a line that cannot be drawn.

        Raises:
            ValueError: if there are fewer than two points, or they are out of order.
        """
        points = self.seconds_by_tokens
        if len(points) < 2 or any(left[0] >= right[0] for left, right in pairwise(points)):
            raise ValueError("seconds_by_tokens needs two points at least, with more tokens from one to the next")

    @property
    def seconds_per_prefill_token(self) -> float:
        """Of the largest step that the line knows."""
        num_tokens, seconds = self.seconds_by_tokens[-1]
        return seconds / num_tokens

    @property
    def seconds_per_swapped_block(self) -> float:
        """One way."""
        return self.per_swapped_block

    def seconds(self, work: StepWork) -> float:
        """Of one step."""
        return (
            self._seconds_of_tokens(work.num_tokens)
            + self.per_row * work.num_rows
            + self.per_context_token * work.num_context_tokens
            + self.per_attention_pair * work.num_attention_pairs
            + self.per_copied_block * work.num_copied_blocks
            + self.per_swapped_block * work.num_swapped_blocks
        )

    def describe(self) -> str:
        """For the report."""
        return f"fitted to measured steps: {self.source}"

    def _seconds_of_tokens(self, num_tokens: int) -> float:
        points = self.seconds_by_tokens
        place = bisect_right(points, num_tokens, key=lambda point: point[0])
        place = min(max(1, place), len(points) - 1)
        (left, at_left), (right, at_right) = points[place - 1], points[place]
        return max(0.0, at_left + (num_tokens - left) * (at_right - at_left) / (right - left))

    def to_json(self) -> dict[str, Any]:
        """Plain values, which `load_fitted_cost` reads back."""
        return asdict(self)


def fitted_cost(values: Mapping[str, Any]) -> FittedCost:
    """Read back what `FittedCost.to_json` gave.

    Raises:
        ValueError: naming the field that is missing or wrong.
    """
    try:
        points: Sequence[Sequence[float]] = values["seconds_by_tokens"]
        numbers = {
            name: float(values[name])
            for name in (
                "per_row",
                "per_context_token",
                "per_attention_pair",
                "per_copied_block",
                "per_swapped_block",
            )
        }
        line = tuple((int(tokens), float(seconds)) for tokens, seconds in points)
        return FittedCost(str(values["source"]), line, **numbers)
    except (KeyError, TypeError) as error:
        raise ValueError(f"a fitted cost model lacks a field or has a wrong one: {error}") from None


def load_fitted_cost(path: Path) -> FittedCost:
    """Read the model that benchmarks/step_cost_model.py has written.

    Raises:
        ValueError: naming the file, if it holds none.
    """
    try:
        return fitted_cost(json.loads(path.read_text(encoding="utf-8"))["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no cost model: {error}.") from None
