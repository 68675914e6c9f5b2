"""Series under names that boards for vLLM ask for, and that say nothing new here: older names of others, and zeros.

Zeros stand for what this server does not do (speculation, LoRA, images, an external KV store, sleeping): a panel or a
rule that asks for them gets an answer.
"""

import time
from collections.abc import Iterable

from prometheus_client.core import Metric

from server.engine_client import EngineClient
from server.messages import EngineStats
from server.metric_families import Families, Snapshot

_NEVER_COUNTED = {
    "vllm:external_prefix_cache_queries": "Tokens looked up in an external KV store; there is none.",
    "vllm:external_prefix_cache_hits": "Of them, those that were found.",
    "vllm:mm_cache_queries": "Images looked up in a cache; there are none.",
    "vllm:mm_cache_hits": "Of them, those that were found.",
    "vllm:corrupted_requests": "Requests with NaN in their logits; not looked for, as in vLLM by default.",
    "vllm:spec_decode_num_drafts": "Drafts of speculative decoding; there is none.",
    "vllm:spec_decode_num_draft_tokens": "Their tokens.",
    "vllm:spec_decode_num_accepted_tokens": "Of them, those that were accepted.",
}


class BoardSeries:
    """Older names and zeros."""

    def __init__(self, families: Families, engine: EngineClient) -> None:
        """Read `engine` at each scrape."""
        self._families = families
        self._engine = engine

    def snapshot(self) -> Snapshot:
        """Every series, as of now."""
        stats = self._engine.stats
        return lambda: self._collect(stats)

    def _collect(self, stats: EngineStats | None) -> Iterable[Metric]:
        yield from self._older_names(stats)
        make = self._families
        for name, documentation in _NEVER_COUNTED.items():
            yield make.counter(name, documentation, 0)
        yield make.counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "The same, by place in the draft.", "position", {"0": 0}
        )
        yield make.gauges(
            "vllm:engine_sleep_state",
            "Whether the engine is awake, or has given up weights or everything; it never sleeps.",
            "sleep_state",
            {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
        )
        adapters = {"max_lora": 0, "running_lora_adapters": None, "waiting_lora_adapters": None}
        yield make.info(
            "vllm:lora_requests_info", "LoRA adapters, in labels, as of its value; none.", adapters, time.time()
        )

    def _older_names(self, stats: EngineStats | None) -> Iterable[Metric]:
        make = self._families
        used = stats.num_used_blocks / stats.num_blocks if stats is not None and stats.num_blocks else 0.0
        on_host = stats.num_used_host_blocks / stats.num_host_blocks if stats and stats.num_host_blocks else 0.0
        yield make.gauge("vllm:gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc.", used)
        yield make.gauge("vllm:cpu_cache_usage_perc", "vLLM's name for octavo_kv_host_usage_perc.", on_host)
        queries = stats.num_prefix_queries if stats is not None else 0
        hits = stats.num_prefix_hits if stats is not None else 0
        yield make.counter("vllm:gpu_prefix_cache_queries", "Older name of vllm:prefix_cache_queries.", queries)
        yield make.counter("vllm:gpu_prefix_cache_hits", "Older name of vllm:prefix_cache_hits.", hits)
