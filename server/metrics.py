"""The Prometheus series of one server, with the names, labels and meanings that boards know; docs/metrics.md has all.

What the engine counts is read at the moment of a scrape (server/engine_metrics.py); what only the edge can see
(latencies as a client feels them, ends of sequences, HTTP) is recorded as it happens. One record per sequence, as vLLM
counts a request with n > 1; of what the engine reports when a prompt and all its sequences have ended, one per prompt.
"""

import asyncio
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from gzip import compress

from prometheus_client import CollectorRegistry, Counter, GCCollector, PlatformCollector, ProcessCollector

from scheduler.output import FinishReason
from scheduler.request_report import RequestReport
from server.board_metrics import BoardSeries
from server.config import Settings
from server.engine_client import EngineClient
from server.engine_metrics import EngineSeries
from server.histogram import Histogram
from server.http_metrics import HttpSeries
from server.info_metrics import InfoSeries
from server.metric_families import LABELS, Families, Snapshot, render
from server.usage_metrics import UsageSeries

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
_LAG_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_COUNT_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_COMPRESSION = 1  # gzip's fastest
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

    def __init__(self, engine: EngineClient, settings: Settings, key_names: Iterable[str] = ()) -> None:
        """Series for the model that is served.

        Args:
            engine: what it counts itself is read at each scrape.
            settings: shown in labels.
            key_names: of all keys that open the server; none where it is open to everyone.
        """
        self._families = Families(settings.served_names[0])
        self._histograms: list[Histogram] = []
        self.usage = UsageSeries(self._families, key_names)
        self._parts = (
            self.usage,
            EngineSeries(self._families, engine),
            InfoSeries(self._families, engine, settings),
            BoardSeries(self._families, engine),
        )
        self._registry = CollectorRegistry()  # of series that are the library's own, which takes locks for them
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._rendering = asyncio.Lock()
        tokens = _one_two_five(_MAX_TOKENS_BUCKET)
        self._queue_time = self._histogram(
            "request_queue_time_seconds", "From the engine's queue to the first admission.", _REQUEST_BUCKETS
        )
        self._prefill_time = self._histogram(
            "request_prefill_time_seconds", "From the first admission to the first token.", _REQUEST_BUCKETS
        )
        self._inference_time = self._histogram(
            "request_inference_time_seconds", "From the first admission to the end.", _REQUEST_BUCKETS
        )
        self._prefill_computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Tokens of a prompt that were not cached.", tokens
        )
        self._longest_answer = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest answer to a prompt.", tokens
        )
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
            "vllm:request_success", "Ended sequences.", (*LABELS, "finished_reason"), registry=self._registry
        )
        self._success = {
            reason: success.labels(*self._families.label_values, reason) for reason in (*_FINISH_REASONS, "repetition")
        }
        self.http = HttpSeries(self._families, self._registry)
        self._loop_lag = self._histogram(
            "event_loop_lag_seconds", "How late the event loop came to what was due.", _LAG_BUCKETS, prefix="octavo_"
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

    def observe_report(self, report: RequestReport) -> None:
        """The engine reports what became of a prompt, however it ended."""
        self.usage.of(report.tenant).add_report(report)
        self._queue_time.observe(report.queue_seconds)
        if report.prefill_seconds is not None:
            self._prefill_time.observe(report.prefill_seconds)
        if report.inference_seconds is not None:
            self._inference_time.observe(report.inference_seconds)
            self._prefill_computed.observe(report.num_prompt_tokens - report.num_cached_tokens)
            self._longest_answer.observe(report.max_generated_tokens)

    def observe_loop_lag(self, seconds: float) -> None:
        """The event loop came so late to a timer."""
        self._loop_lag.observe(seconds)

    def latencies(self) -> Mapping[str, Histogram]:
        """What the dashboard draws percentiles of, by the names of the series."""
        return {
            "time_to_first_token_seconds": self._first_token,
            "inter_token_latency_seconds": self._inter_token,
            "e2e_request_latency_seconds": self._latency,
            "request_queue_time_seconds": self._queue_time,
        }

    async def exposition(self, *, is_compressed: bool = False) -> bytes:
        """The text that Prometheus scrapes, or its gzip: as of now, written in a thread, for one scrape at a time."""
        async with self._rendering:
            text = await asyncio.to_thread(partial(render, self._snapshots()))
            return await asyncio.to_thread(compress, text, _COMPRESSION) if is_compressed else text

    def _snapshots(self) -> list[Snapshot]:
        parts = [part.snapshot() for part in self._parts]
        older = self._inter_token.snapshot_as(
            "vllm:time_per_output_token_seconds", "Older name of vllm:inter_token_latency_seconds."
        )
        return [*parts, *(histogram.snapshot() for histogram in self._histograms), older, self._registry.collect]

    def _histogram(
        self, name: str, documentation: str, buckets: Iterable[float], *, prefix: str = "vllm:"
    ) -> Histogram:
        histogram = Histogram(f"{prefix}{name}", documentation, self._families.labels, buckets)
        self._histograms.append(histogram)
        return histogram


def _one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `limit`."""
    powers = range(int(math.log10(limit)) + 1)
    return tuple(float(m * 10**p) for p in powers for m in (1, 2, 5) if m * 10**p <= limit)
