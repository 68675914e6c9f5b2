"""Finds out whether what a query asks for is among the series that the server exports, by name and by labels."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

TARGET_LABELS = {"instance": "server:8000", "job": "octavo"}  # that Prometheus adds
_OF_PROMETHEUS = {"ALERTS", "up"}

Labels = Mapping[str, str]


class ExportedSeries:
    """What a server shows on /metrics, and what Prometheus records of it under the names `recorded`."""

    def __init__(self, exposition: str, recorded: Collection[str] = ()) -> None:
        self._recorded = {*recorded, *_OF_PROMETHEUS}  # their labels are not known here
        self._labels: dict[str, list[Labels]] = defaultdict(list)
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                self._labels[sample.name].append(sample.labels | TARGET_LABELS)

    @property
    def names(self) -> set[str]:
        return set(self._labels)

    def missing(self, query: str) -> list[str]:
        """What of the query no series answers: selectors, and labels that it groups by. Empty if all do."""
        tree = promql.parse(query)
        selectors = [node for node in nodes(tree) if isinstance(node, promql.VectorSelector)]
        labels = {name for s in selectors for series in self._labels.get(s.name, ()) for name in series}
        groups = [node.modifier for node in nodes(tree) if isinstance(node, promql.AggregateExpr) and node.modifier]
        asked = {name for group in groups for name in group.labels}
        nothing_ours = all(s.name in self._recorded for s in selectors)
        return [str(s) for s in selectors if not self._has(s)] + sorted(() if nothing_ours else asked - labels)

    def _has(self, selector: promql.VectorSelector) -> bool:
        if selector.name in self._recorded:
            return True
        return any(_matches(series, selector) for series in self._labels.get(selector.name, ()))


def _matches(labels: Labels, selector: promql.VectorSelector) -> bool:
    for matcher in selector.matchers.matchers:
        value = labels.get(matcher.name, "")
        equal = value == matcher.value
        alike = re.fullmatch(matcher.value, value) is not None
        fits = {"Equal": equal, "NotEqual": not equal, "Re": alike, "NotRe": not alike}
        if not fits[str(matcher.op).rpartition(".")[2]]:
            return False
    return True


def nodes(node: object) -> Iterator[object]:
    """A parsed query's node and all beneath it."""
    yield node
    for name in ("expr", "lhs", "rhs", "param", "vector_selector"):
        below = getattr(node, name, None)
        if below is not None:
            yield from nodes(below)
    for argument in getattr(node, "args", ()):
        yield from nodes(argument)
