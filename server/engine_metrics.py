"""The series that come from the engine's newest statistics, as they stand at the moment of a scrape.

Names, labels and meanings are vLLM's where it has the idea, and begin with `octavo_` where it has not. They restart
from zero with the engine, as counters may. Knows no request.
"""

import time
from collections.abc import Iterable

from prometheus_client.core import Metric

from server.engine_client import EngineClient
from server.histogram import INF, histogram_family
from server.messages import EngineStats
from server.metric_families import Families, Snapshot
from server.step_clock import STEP_PARTS, STEP_TOKEN_BOUNDS

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


class EngineSeries:
    """Turns what the engine last said into series; all are there from the start."""

    def __init__(self, families: Families, engine: EngineClient) -> None:
        """Read `engine` at each scrape."""
        self._families = families
        self._engine = engine
        self._created = time.time()

    def snapshot(self) -> Snapshot:
        """Every series, as of now."""
        stats = self._engine.stats or _NOTHING_YET
        seen_from_here = self._seen_from_here()
        block_size = 0 if self._engine.info is None else self._engine.info.block_size
        return lambda: [*seen_from_here, *self._collect(stats, block_size)]

    def _seen_from_here(self) -> list[Metric]:
        """What the edge knows of the engine, whether or not that says anything."""
        make, engine = self._families, self._engine
        return [
            make.gauge("octavo_engine_ready", "1 while new requests are served, as /health/ready says.", engine.ready),
            make.counter("octavo_engine_restarts", "Times that the engine process was lost.", engine.num_restarts),
            make.gauge(
                "octavo_open_requests", "Prompts that the engine was given and has not ended.", engine.num_open_requests
            ),
        ]

    def _collect(self, stats: EngineStats, block_size: int) -> Iterable[Metric]:
        yield from self._steps(stats)
        yield from self._queues(stats)
        yield from self._tokens(stats)
        yield from self._blocks(stats)
        yield from self._sharing(stats, block_size)
        yield from self._host_blocks(stats)

    def _steps(self, stats: EngineStats) -> Iterable[Metric]:
        make = self._families
        yield make.counter("octavo_engine_steps", "Steps that computed something.", stats.num_steps)
        yield make.counters(
            "octavo_step_seconds",
            "Where the time of the engine's steps went: choosing tokens and blocks, computing, taking in the result, "
            "and between two steps.",
            "part",
            {part: stats.step_seconds.get(part, 0.0) for part in STEP_PARTS},
        )
        bounds = (*STEP_TOKEN_BOUNDS, INF)
        yield histogram_family(
            "vllm:iteration_tokens_total",
            "Tokens that a step computed.",
            make.labels,
            bounds,
            stats.step_token_counts or (0,) * len(bounds),
            stats.num_step_tokens,
            self._created,
        )

    def _queues(self, stats: EngineStats) -> Iterable[Metric]:
        make = self._families
        yield make.gauge("vllm:num_requests_running", "Sequences that run.", stats.num_running)
        yield make.gauge("vllm:num_requests_waiting", "Sequences that wait to run.", stats.num_waiting)
        yield make.gauges(
            "vllm:num_requests_waiting_by_reason",
            "Of them, those that wait for room, and those whose grammar is being compiled.",
            "reason",
            {"capacity": stats.num_waiting - stats.num_deferred, "deferred": stats.num_deferred},
        )
        yield make.gauge(
            "octavo_num_queued_prompt_tokens", "Of prompts that have not been admitted.", stats.num_queued_tokens
        )
        yield make.gauge("octavo_num_requests_starving", "That have waited for very long.", stats.num_starving)
        yield make.counter("vllm:num_preemptions", "Preempted sequences.", stats.num_preemptions)
        yield make.counters(
            "vllm:admission_rejections",
            "Requests that the queue had no room for.",
            "reason",
            {"queue_full": stats.num_dropped_queue_full},
        )
        yield make.counters(
            "octavo_requests_dropped",
            "Requests that were ended for want of room or time.",
            "cause",
            {
                "queue_full": stats.num_dropped_queue_full,
                "queue_timeout": stats.num_dropped_queue_timeout,
                "deadline": stats.num_dropped_deadline,
            },
        )

    def _tokens(self, stats: EngineStats) -> Iterable[Metric]:
        make, hits = self._families, stats.num_prefix_hits
        yield make.counter(
            "octavo_engine_prompt_tokens", "Tokens of prompts that the engine admitted.", stats.num_prompt_tokens
        )
        yield make.counter(
            "octavo_engine_generation_tokens",
            "Tokens that the engine generated, those that came too late for anybody included.",
            stats.num_generation_tokens,
        )
        yield make.counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_prefix_queries
        )
        yield make.counter("vllm:prefix_cache_hits", "Of them, those that were found.", hits)
        yield make.counter(
            "octavo_recomputed_tokens", "Tokens computed again after preemption.", stats.num_recomputed_tokens
        )
        yield make.counter(
            "vllm:prompt_tokens_recomputed", "Of them, those of prompts.", stats.num_recomputed_prompt_tokens
        )

    def _blocks(self, stats: EngineStats) -> Iterable[Metric]:
        make = self._families
        used = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        yield make.gauge("vllm:kv_cache_usage_perc", "Used part of the KV blocks, 0 to 1.", used)
        num_cached = stats.num_evictable_blocks
        yield make.gauges(
            "octavo_kv_blocks",
            "KV blocks: used = some sequence holds them; cached = none does, and they keep a prefix until they are "
            "needed; free = neither.",
            "state",
            {
                "free": stats.num_blocks - stats.num_used_blocks - num_cached,
                "cached": num_cached,
                "used": stats.num_used_blocks,
            },
        )
        yield make.gauge(
            "octavo_kv_blocks_cached", "Blocks that others may begin with, used ones included.", stats.num_cached_blocks
        )
        yield make.counter("octavo_kv_blocks_evicted", "Cached blocks given up for others.", stats.num_evicted_blocks)
        yield make.counter(
            "octavo_kv_cache_integrity_failures", "Idle checks that failed.", stats.num_integrity_failures
        )

    def _sharing(self, stats: EngineStats, block_size: int) -> Iterable[Metric]:
        make = self._families
        yield make.gauge(
            "octavo_kv_blocks_shared", "Used blocks that more than one sequence holds.", stats.num_shared_blocks
        )
        yield make.gauge(
            "octavo_kv_blocks_saved", "Blocks that would be needed besides, were none shared.", stats.num_saved_blocks
        )
        yield make.counter(
            "octavo_kv_blocks_copied",
            "Shared blocks that were copied before one of their holders wrote to them (copy-on-write).",
            stats.num_copied_blocks,
        )
        num_slots = stats.num_used_blocks * block_size
        wasted = stats.num_empty_slots / num_slots if num_slots else 0.0
        yield make.gauge("octavo_kv_waste_perc", "Part of used blocks' slots that hold no token, 0 to 1.", wasted)

    def _host_blocks(self, stats: EngineStats) -> Iterable[Metric]:
        make = self._families
        host = stats.num_used_host_blocks / stats.num_host_blocks if stats.num_host_blocks else 0.0
        yield make.gauge("octavo_kv_host_usage_perc", "Used part of the host's KV blocks, 0 to 1.", host)
        yield make.counter("octavo_kv_blocks_swapped_out", "To host memory.", stats.num_swapped_out_blocks)
        yield make.counter("octavo_kv_blocks_swapped_in", "From host memory.", stats.num_swapped_in_blocks)
