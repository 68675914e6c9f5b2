"""The series that come from the engine's newest statistics, read at the moment of a scrape.

Names, labels and meanings are vLLM's where it has the idea, and begin with `octavo_` where it has not. They restart
from zero with the engine, as counters may. Knows no request.
"""

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.engine_client import EngineClient
from server.messages import EngineInfo, EngineStats

LABELS = ("model_name", "engine")
_NOTHING_YET = EngineStats(
    num_running=0,
    num_waiting=0,
    num_blocks=0,
    num_used_blocks=0,
    num_steps=0,
    num_preemptions=0,
    num_prompt_tokens=0,
    num_generation_tokens=0,
    num_recomputed_tokens=0,
)


class EngineCollector(Collector):
    """Turns what the engine last said into series; all are there from the start."""

    def __init__(self, labels: tuple[str, str], engine: EngineClient) -> None:
        """`labels` are the values of LABELS."""
        self._labels = labels
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """Every series, as of now."""
        stats = self._engine.stats or _NOTHING_YET
        yield from self._queues(stats)
        yield from self._tokens(stats)
        yield from self._blocks(stats)
        if self._engine.info is not None:
            yield self._cache_config(self._engine.info)

    def _queues(self, stats: EngineStats) -> Iterable[Metric]:
        yield self._gauge("vllm:num_requests_running", "Sequences that run.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait to run.", stats.num_waiting)
        yield self._by(
            "reason",
            GaugeMetricFamily,
            "vllm:num_requests_waiting_by_reason",
            "Of them, those that wait for room, and those whose grammar is being compiled.",
            [("capacity", stats.num_waiting - stats.num_deferred), ("deferred", stats.num_deferred)],
        )
        yield self._gauge(
            "octavo_num_queued_prompt_tokens", "Of prompts that have not been admitted.", stats.num_queued_tokens
        )
        yield self._gauge("octavo_num_requests_starving", "That have waited for very long.", stats.num_starving)
        yield self._counter("vllm:num_preemptions", "Preempted sequences.", stats.num_preemptions)
        yield self._by(
            "reason",
            CounterMetricFamily,
            "vllm:admission_rejections",
            "Requests that the queue had no room for.",
            [("queue_full", stats.num_dropped_queue_full)],
        )
        yield self._by(
            "cause",
            CounterMetricFamily,
            "octavo_requests_dropped",
            "Requests that were ended for want of room or time.",
            [
                ("queue_full", stats.num_dropped_queue_full),
                ("queue_timeout", stats.num_dropped_queue_timeout),
                ("deadline", stats.num_dropped_deadline),
            ],
        )

    def _tokens(self, stats: EngineStats) -> Iterable[Metric]:
        hits = stats.num_prefix_hits
        yield self._counter("vllm:prompt_tokens", "Tokens of admitted prompts.", stats.num_prompt_tokens)
        yield self._counter("vllm:prompt_tokens_cached", "Of them, those that were cached.", hits)
        yield self._by(
            "source",
            CounterMetricFamily,
            "vllm:prompt_tokens_by_source",
            "Tokens of admitted prompts, by where their keys and values came from.",
            [
                ("local_compute", stats.num_prompt_tokens - hits),
                ("local_cache_hit", hits),
                ("external_kv_transfer", 0),
            ],
        )
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_prefix_queries
        )
        yield self._counter("vllm:prefix_cache_hits", "Of them, those that were found.", hits)
        yield self._counter("vllm:generation_tokens", "Generated tokens.", stats.num_generation_tokens)
        yield self._counter(
            "vllm:prompt_tokens_recomputed", "Tokens computed again after preemption.", stats.num_recomputed_tokens
        )

    def _blocks(self, stats: EngineStats) -> Iterable[Metric]:
        used = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Used part of the KV blocks, 0 to 1.", used)
        yield self._gauge(
            "octavo_kv_blocks_saved", "Blocks that would be needed besides, were none shared.", stats.num_saved_blocks
        )
        yield self._gauge("octavo_kv_blocks_cached", "Blocks that others may begin with.", stats.num_cached_blocks)
        yield self._counter("octavo_kv_blocks_evicted", "Cached blocks given up for others.", stats.num_evicted_blocks)
        yield self._counter("octavo_kv_blocks_swapped_out", "To host memory.", stats.num_swapped_out_blocks)
        yield self._counter("octavo_kv_blocks_swapped_in", "From host memory.", stats.num_swapped_in_blocks)
        host = stats.num_used_host_blocks / stats.num_host_blocks if stats.num_host_blocks else 0.0
        yield self._gauge("octavo_kv_host_usage_perc", "Used part of the host's KV blocks, 0 to 1.", host)
        yield self._counter(
            "octavo_kv_cache_integrity_failures", "Idle checks that failed.", stats.num_integrity_failures
        )

    def _cache_config(self, info: EngineInfo) -> Metric:
        labels = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "cache_dtype": info.dtype,
            "enable_prefix_caching": str(info.enable_prefix_caching),
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache, in labels.", labels=(*LABELS, *labels.keys())
        )
        family.add_metric((*self._labels, *labels.values()), 1)
        return family

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, documentation, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(name, documentation, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _by(
        self,
        label: str,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        documentation: str,
        values: Sequence[tuple[str, float]],
    ) -> Metric:
        family = kind(name, documentation, labels=(*LABELS, label))
        for value_of_label, value in values:
            family.add_metric((*self._labels, value_of_label), value)
        return family
