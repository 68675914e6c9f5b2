"""A Prometheus histogram for one thread: prometheus_client's own takes a lock and a loop, which each token would pay.

Looks the same to whoever scrapes it. Knows no series of ours.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import INF, floatToGoString


class Histogram(Collector):
    """One series. Only the thread that made it may observe."""

    def __init__(self, name: str, documentation: str, labels: Mapping[str, str], bounds: Iterable[float]) -> None:
        """Count values up to each of the ascending `bounds`, and those beyond."""
        self._name = name
        self._documentation = documentation
        self._labels = dict(labels)
        self._bounds = (*bounds, INF)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._created = time.time()

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """The series, as of now."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=tuple(self._labels))
        buckets: list[tuple[str, float]] = []
        num_values = 0
        for bound, count in zip(self._bounds, self._counts, strict=True):
            num_values += count
            buckets.append((floatToGoString(bound), num_values))
        family.add_metric(tuple(self._labels.values()), buckets, self._sum)
        family.add_sample(f"{self._name}_created", self._labels, self._created)
        yield family
