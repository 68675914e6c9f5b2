"""The HTTP series, named and labelled as by the instrumentation that vLLM's users have: by route and class of status.

What operators' machines ask (health, metrics, version, the dashboard's data) is left out, as there: probes of a server
that still loads would look like errors of its users. So are looks at what happens to a request, of which a page has
several a second: they would hide what the requests themselves take. Knows no request's content.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

from server.metric_families import LABELS, Families

UNMATCHED = "unmatched"  # the handler of whatever was answered before it came to a route that takes it
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER_METHOD = "OTHER"
_LEFT_OUT = ("/health", "/metrics", "/version", "/v1/requests/", "/dashboard")
_CLASSES = ("2xx", "4xx", "5xx")
# All that this server answers with.
_ERRORS = (400, 401, 403, 404, 405, 413, 429, 499, 500, 503, 504, 529)
_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 600.0)


@dataclass(frozen=True, slots=True)
class HttpRecord:
    """One answered request."""

    handler: str  # a route's template: paths would make endless series
    method: str  # of METHODS, or OTHER_METHOD
    status: int
    seconds: float
    num_request_bytes: int  # of the body, as far as it was read
    num_response_bytes: int  # of the body, as sent


class HttpSeries:
    """Counts answers. The library's own series, which may be collected in any thread."""

    def __init__(self, families: Families, registry: CollectorRegistry) -> None:
        """Keep the series in `registry`."""
        self._expected: set[tuple[str, str]] = set()  # handlers with the methods that they take
        self._requests = Counter(
            "http_requests", "Answered requests.", ("handler", "method", "status"), registry=registry
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "From the request's first byte to the answer's last.",
            ("handler", "method"),
            buckets=_BUCKETS,
            registry=registry,
        )
        self._request_bytes = Summary(
            "http_request_size_bytes", "Bodies of requests, as they were read.", ("handler",), registry=registry
        )
        self._response_bytes = Summary(
            "http_response_size_bytes", "Bodies of answers, as sent.", ("handler",), registry=registry
        )
        errors = Counter(
            "octavo_http_errors", "Answers with an error, by status.", (*LABELS, "code"), registry=registry
        )
        self._errors = lambda status: errors.labels(*families.label_values, str(status))
        for status in _ERRORS:
            self._errors(status)
        self.expect(UNMATCHED, [*sorted(METHODS), OTHER_METHOD])

    def expect(self, handler: str, methods: Iterable[str]) -> None:
        """Show the series of a route before anybody has asked for it."""
        if handler.startswith(_LEFT_OUT):
            return
        for method in methods:
            self._expected.add((handler, method))
            self._seconds.labels(handler, method)
            for status in _CLASSES:
                self._requests.labels(handler, method, status)
        self._request_bytes.labels(handler)
        self._response_bytes.labels(handler)

    def observe(self, record: HttpRecord) -> None:
        """Count one."""
        handler, method = record.handler, record.method
        if handler.startswith(_LEFT_OUT):
            return
        if (handler, method) not in self._expected:  # a route is found for a method too that it does not take
            handler = UNMATCHED
        self._requests.labels(handler, method, f"{record.status // 100}xx").inc()
        self._seconds.labels(handler, method).observe(record.seconds)
        self._request_bytes.labels(handler).observe(record.num_request_bytes)
        self._response_bytes.labels(handler).observe(record.num_response_bytes)
        if record.status >= 400:
            self._errors(record.status).inc()
