"""Makes Prometheus families that carry the labels which all series of one engine have. Knows no series of ours.

A `Snapshot` is what a part of the metrics hands over: values as they were at one moment, taken on the event loop,
which any thread may turn into families.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

LABELS = ("model_name", "engine")
ENGINE = "0"  # as vLLM numbers the engines of one server; there is one

Snapshot = Callable[[], Iterable[Metric]]


@dataclass(frozen=True, slots=True)
class Families:
    """Families of one engine's series."""

    model_name: str
    engine: str = ENGINE

    @property
    def label_values(self) -> tuple[str, str]:
        """Of LABELS."""
        return self.model_name, self.engine

    @property
    def labels(self) -> dict[str, str]:
        """Names and values."""
        return dict(zip(LABELS, self.label_values, strict=True))

    def gauge(self, name: str, documentation: str, value: float) -> Metric:
        """One series that may fall."""
        family = GaugeMetricFamily(name, documentation, labels=LABELS)
        family.add_metric(self.label_values, value)
        return family

    def counter(self, name: str, documentation: str, value: float) -> Metric:
        """One series that only grows; scrapers see its name with `_total` behind it."""
        family = CounterMetricFamily(name, documentation, labels=LABELS)
        family.add_metric(self.label_values, value)
        return family

    def gauges(self, name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
        """A series that may fall for each value of one more label."""
        family = GaugeMetricFamily(name, documentation, labels=(*LABELS, label))
        for value_of_label, value in values.items():
            family.add_metric((*self.label_values, value_of_label), value)
        return family

    def counters(self, name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
        """A series that only grows for each value of one more label."""
        family = CounterMetricFamily(name, documentation, labels=(*LABELS, label))
        for value_of_label, value in values.items():
            family.add_metric((*self.label_values, value_of_label), value)
        return family

    def info(self, name: str, documentation: str, labels: Mapping[str, object], value: float = 1.0) -> Metric:
        """Facts that stand in labels; None = not known yet, which Prometheus takes for a label that is not there."""
        family = GaugeMetricFamily(name, documentation, labels=(*LABELS, *labels))
        texts = ("" if fact is None else str(fact) for fact in labels.values())
        family.add_metric((*self.label_values, *texts), value)
        return family


class _Collected(Collector):
    """Snapshots, as the library wants to be given families."""

    def __init__(self, snapshots: Iterable[Snapshot]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterable[Metric]:
        for snapshot in self._snapshots:
            yield from snapshot()


def render(snapshots: Iterable[Snapshot]) -> bytes:
    """The families of all snapshots in Prometheus's text format. Takes milliseconds; safe in any thread."""
    return generate_latest(_Collected(snapshots))
