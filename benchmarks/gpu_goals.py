"""The goals of the check of a card, what its results say of each, and the Markdown page of such results.

Needs neither torch nor a card.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on one number of one measurement."""

    text: str
    part: str
    measurement: str
    key: str
    limit: float
    is_least: bool = False  # the limit is the least that is good enough; else the most

    def value(self, result: Mapping[str, Any]) -> float | None:
        """The number that was measured; None if it was not."""
        value = result["parts"].get(self.part, {}).get(self.measurement, {}).get(self.key)
        return float(value) if isinstance(value, (int, float)) else None

    def is_met(self, value: float) -> bool:
        """Whether the number is within the bound."""
        return value >= self.limit if self.is_least else value <= self.limit


def _decode(shape: str) -> Goal:
    return Goal(
        f"decode {shape}: share of the copy bandwidth", "attention", f"decode {shape}", "copy_share", 0.85, True
    )


def _prefill(length: str) -> Goal:
    return Goal(f"prefill of {length} tokens: TFLOP/s", "attention", f"prefill {length}", "tflops", 450.0, True)


def _paging(shape: str) -> Goal:
    return Goal(f"paged over contiguous, {shape}", "attention", f"paging {shape}", "over_contiguous", 1.05)


def _sdpa(shape: str) -> Goal:
    return Goal(f"paged over torch's attention, {shape}", "attention", f"paging {shape}", "over_sdpa", 1.05)


def _invariant(shape: str) -> Goal:
    return Goal(f"batch-invariant over default, {shape}", "attention", f"invariant {shape}", "over_default", 1.6)


DECODE_SHAPES = ("1 x 32k", "8 x 32k", "64 x 2k")
PREFILL_LENGTHS = ("4k", "16k")
COMPARED = (*(f"decode {shape}" for shape in DECODE_SHAPES), "prefill 4k")
GOALS = (
    *map(_decode, DECODE_SHAPES),
    *map(_prefill, PREFILL_LENGTHS),
    *map(_paging, COMPARED),
    *map(_sdpa, COMPARED),
    Goal("mixed batch over the sum of its parts", "attention", "mixed batch", "over_parts", 1.1),
    *map(_invariant, COMPARED),
    Goal("host milliseconds a step at 64 sequences", "engine", "64 sequences, graphs", "host_ms", 1.0),
)


def goal_rows(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Goal, bound, what was measured, and whether it is met."""
    rows = []
    for goal in GOALS:
        value = goal.value(result)
        bound = f"{'>=' if goal.is_least else '<='} {goal.limit:g}"
        if value is None:
            rows.append((goal.text, bound, "-", "not measured"))
        else:
            rows.append((goal.text, bound, f"{value:.3g}", "met" if goal.is_met(value) else "MISSED"))
    return rows


def to_markdown(result: Mapping[str, Any]) -> str:
    """The whole file as a page: the card, the goals, and one table for each part."""
    card, machine = result["card"], result["machine"]
    facts = ", ".join(f"{key} {value}" for key, value in card.items() if key != "name")
    lines = [
        f"# {card['name']}, {machine['date']}",
        "",
        f"{facts}{'; ' if facts else ''}torch {machine['torch']}, triton {machine['triton']}, "
        f"transformers {machine['transformers']}, octavo {machine['octavo']} at {machine['commit']}.",
        "",
    ]
    if result.get("dry_run"):
        lines += ["**A dry run on a CPU: the numbers mean nothing.**", ""]
    lines += ["## Goals", "", *_table(("goal", "bound", "measured", ""), goal_rows(result)), ""]
    for part, measurements in result["parts"].items():
        lines += [f"## {part}", "", f"`{result['commands'].get(part, '')}`", "", *_part_table(measurements), ""]
    return "\n".join(lines)


def _part_table(measurements: Mapping[str, Mapping[str, object]]) -> list[str]:
    """One row for each measurement; its columns are all keys of the part, in the order of their first use."""
    keys = list(dict.fromkeys(key for values in measurements.values() for key in values))
    rows = [(name, *(_cell(values.get(key, "")) for key in keys)) for name, values in measurements.items()]
    return _table(("", *keys), rows)


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    rule = "|".join("---" for _ in header)
    return [f"| {' | '.join(header)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)]


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")
