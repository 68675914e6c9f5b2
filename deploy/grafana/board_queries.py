"""Reads the queries of a board from its JSON, and puts values in the places of Grafana's variables.

Knows how Grafana writes a board, and no board by name.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One query, and where it stands."""

    board: str
    panel: str
    query: str


class UnknownVariable(ValueError):
    """A query has a variable that nobody gave a value."""


def panels_of(board: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All panels of a board, those of collapsed rows included, rows themselves not."""
    for panel in board["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", ())
        else:
            yield panel


def queries_of(board: Mapping[str, Any]) -> list[PanelQuery]:
    """What the board asks, in the order of its panels."""
    return [
        PanelQuery(board["title"], panel["title"], target["expr"])
        for panel in panels_of(board)
        for target in panel["targets"]
    ]


def filled(query: str, values: Mapping[str, str]) -> str:
    """The query with a value for each `$variable` and `${variable}`.

    Raises:
        UnknownVariable: `values` lacks one.
    """

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in values:
            raise UnknownVariable(f"${name} has no value in: {query}")
        return values[name]

    return _VARIABLE.sub(value_of, query)
