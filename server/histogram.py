"""A Prometheus histogram for one thread: prometheus_client's own takes a lock and a loop, which each token would pay.

Looks the same to whoever scrapes it. Knows no series of ours.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import INF, floatToGoString

from server.metric_families import Snapshot


class Histogram:
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

    @property
    def bounds(self) -> tuple[float, ...]:
        """Ascending, the last one infinite."""
        return self._bounds

    @property
    def counts(self) -> tuple[int, ...]:
        """How many values so far were up to each bound and above the one before."""
        return tuple(self._counts)

    def snapshot(self) -> Snapshot:
        """The series, as of now."""
        return self.snapshot_as(self._name, self._documentation)

    def snapshot_as(self, name: str, documentation: str) -> Snapshot:
        """The same under another name."""
        counts, total = tuple(self._counts), self._sum
        return lambda: [histogram_family(name, documentation, self._labels, self._bounds, counts, total, self._created)]


def histogram_family(
    name: str,
    documentation: str,
    labels: Mapping[str, str],
    bounds: Iterable[float],
    counts: Iterable[int],
    total: float,
    created: float,
) -> Metric:
    """A histogram from how many values were in each bucket alone.

    Args:
        name: with its unit.
        documentation: for people.
        labels: of the one series.
        bounds: ascending, the last one infinite.
        counts: values up to each bound and above the one before.
        total: the sum of all values.
        created: when counting began, in seconds since the epoch.
    """
    family = HistogramMetricFamily(name, documentation, labels=tuple(labels))
    buckets: list[tuple[str, float]] = []
    num_values = 0
    for bound, count in zip(bounds, counts, strict=True):
        num_values += count
        buckets.append((floatToGoString(bound), num_values))
    family.add_metric(tuple(labels.values()), buckets, total)
    family.add_sample(f"{name}_created", dict(labels), created)
    return family
