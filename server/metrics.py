"""The Prometheus series of one server, in a registry of its own, with the names, labels and meanings that boards know.

What the engine counts is read at the moment of a scrape; what only the edge can see (latencies as a client feels
them, ends of sequences, HTTP) is recorded as it happens. One record per sequence, as vLLM counts a request with n > 1.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.output import FinishReason
from server.engine_client import EngineClient

_LABELS = ("model_name", "engine")
_ENGINE = "0"
# vLLM's edges, and finer ones below them: a small model answers faster than its lowest.
_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_HTTP_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 600.0)
_COUNT_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_MAX_TOKENS_BUCKET = 1 << 20
_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """How one sequence went. Times in seconds."""

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_generation_tokens: int
    max_tokens: int
    latency: float  # from the arrival of the request
    decode_time: float | None  # from the first token to the last; None before there were two


class ServerMetrics:
    """Every series, present from the start."""

    def __init__(self, model_name: str, engine: EngineClient) -> None:
        """Series for one model; the engine's own counters are read from `engine` at each scrape."""
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model_name, engine))
        ProcessCollector(registry=self._registry)
        self._labels = (model_name, _ENGINE)
        tokens = _one_two_five(_MAX_TOKENS_BUCKET)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_BUCKETS
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Between a sequence's tokens.", _PER_TOKEN_BUCKETS
        )
        self._per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean over a sequence, after its first token.", _PER_TOKEN_BUCKETS
        )
        self._latency = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _REQUEST_BUCKETS)
        self._decode_time = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", _REQUEST_BUCKETS
        )
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a prompt.", tokens)
        self._generation_tokens = self._histogram("request_generation_tokens", "Tokens of an answer.", tokens)
        self._max_tokens = self._histogram("request_params_max_tokens", "The max_tokens of requests.", tokens)
        self._n = self._histogram("request_params_n", "The n of requests.", _COUNT_BUCKETS)
        success = Counter(
            "vllm:request_success", "Ended sequences.", (*_LABELS, "finished_reason"), registry=self._registry
        )
        self._success = {reason: success.labels(*self._labels, reason) for reason in _FINISH_REASONS}
        self._http_requests = Counter(
            "http_requests", "Answered HTTP requests.", ("handler", "method", "status"), registry=self._registry
        )
        self._http_duration = Histogram(
            "http_request_duration_seconds",
            "From the request's first byte to the answer's last.",
            ("handler", "method"),
            buckets=_HTTP_BUCKETS,
            registry=self._registry,
        )

    def observe_n(self, n: int) -> None:
        """A request for `n` sequences went to the engine."""
        self._n.observe(n)

    def observe_first_token(self, seconds: float) -> None:
        """A sequence's first token came, so long after the request."""
        self._first_token.observe(seconds)

    def observe_inter_token(self, seconds: float) -> None:
        """A later token came, so long after the one before."""
        self._inter_token.observe(seconds)

    def observe_end(self, record: SequenceRecord) -> None:
        """A sequence ended, however it did."""
        self._success[record.finish_reason].inc()
        self._latency.observe(record.latency)
        self._prompt_tokens.observe(record.num_prompt_tokens)
        self._generation_tokens.observe(record.num_generation_tokens)
        self._max_tokens.observe(record.max_tokens)
        if record.decode_time is not None:
            self._decode_time.observe(record.decode_time)
            self._per_output_token.observe(record.decode_time / (record.num_generation_tokens - 1))

    def observe_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """An HTTP request was answered. `handler` is a route's template: a path would make endless series."""
        self._http_requests.labels(handler, method, str(status)).inc()
        self._http_duration.labels(handler, method).observe(seconds)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, documentation: str, buckets: Iterable[float]) -> Histogram:
        family = Histogram(f"vllm:{name}", documentation, _LABELS, buckets=tuple(buckets), registry=self._registry)
        return family.labels(*self._labels)


class _EngineCollector(Collector):
    """Turns the engine's newest statistics into series. They restart from zero with the engine, as counters may."""

    def __init__(self, model_name: str, engine: EngineClient) -> None:
        self._labels = (model_name, _ENGINE)
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        stats, info = self._engine.stats, self._engine.info
        used = stats.num_used_blocks / stats.num_blocks if stats is not None and stats.num_blocks else 0.0
        yield self._gauge("num_requests_running", "Sequences that run.", stats.num_running if stats else 0)
        yield self._gauge("num_requests_waiting", "Sequences that wait to run.", stats.num_waiting if stats else 0)
        yield self._gauge("kv_cache_usage_perc", "Used part of the KV blocks, 0 to 1.", used)
        yield self._counter("num_preemptions", "Preempted sequences.", stats.num_preemptions if stats else 0)
        yield self._counter("prompt_tokens", "Tokens of admitted prompts.", stats.num_prompt_tokens if stats else 0)
        yield self._counter("generation_tokens", "Generated tokens.", stats.num_generation_tokens if stats else 0)
        yield self._counter(
            "prompt_tokens_recomputed",
            "Tokens computed again after preemption.",
            stats.num_recomputed_tokens if stats else 0,
        )
        integrity = CounterMetricFamily(
            "octavo_kv_cache_integrity_failures", "Idle checks that failed.", labels=_LABELS
        )
        integrity.add_metric(self._labels, stats.num_integrity_failures if stats else 0)
        yield integrity
        if info is not None:
            cache = GaugeMetricFamily(
                "vllm:cache_config_info",
                "The KV cache, in labels.",
                labels=(*_LABELS, "block_size", "num_gpu_blocks", "cache_dtype"),
            )
            cache.add_metric((*self._labels, str(info.block_size), str(info.num_blocks), info.dtype), 1)
            yield cache

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", documentation, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", documentation, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family


def _one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `limit`."""
    powers = range(int(math.log10(limit)) + 1)
    return tuple(float(m * 10**p) for p in powers for m in (1, 2, 5) if m * 10**p <= limit)
