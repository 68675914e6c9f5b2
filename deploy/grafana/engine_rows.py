"""The rows of the board that tell what the server does inside: scheduler, KV cache, processes, versions and settings.

Each query is of one server's series, as docs/metrics.md describes them.
"""

from deploy.grafana.panels import Row, Sized, distribution, facts, lines, number
from deploy.grafana.queries import (
    SERVER_SELECTOR,
    increase,
    mean,
    mean_observed,
    quantile,
    quotient,
    rate,
    selected,
    total,
)

_STEPS = "octavo_engine_steps_total"
_STEP_SECONDS = "octavo_step_seconds_total"
_LAG = "octavo_event_loop_lag_seconds"
_HITS, _LOOKED_UP = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
_MUST_NOT_HAPPEN = ((None, "green"), (1, "red"))
_NO_FACTS = ("Time", "Value", "__name__", "job")  # columns that Prometheus adds


def scheduler_row() -> Row:
    """What runs, what waits, and what a step's time is spent on."""
    return Row("Scheduler", [*_queues(), *_steps()])


def kv_cache_row() -> Row:
    """Where the blocks are, and what sharing and evicting them gains and costs."""
    return Row("KV cache", [*_blocks(), *_prefixes(), *_movements()])


def process_row() -> Row:
    """What the server's own process takes of the machine; the engine's is another one."""
    return Row(
        "Server process",
        [
            lines(
                "Processor",
                "Of the process that speaks HTTP; 1 is one core.",
                {"{{instance}}": rate("process_cpu_seconds_total", by="instance", selector=SERVER_SELECTOR)},
            ),
            lines(
                "Memory",
                "Of the same process. The model and the KV cache are in the engine's.",
                {"{{instance}}": total("process_resident_memory_bytes", by="instance", selector=SERVER_SELECTOR)},
                unit="bytes",
            ),
            lines(
                "Open files",
                "Connections included.",
                {"{{instance}}": total("process_open_fds", by="instance", selector=SERVER_SELECTOR)},
            ),
        ],
    )


def info_row() -> Row:
    """What runs here."""
    config = selected("octavo_config_info")
    return Row(
        "Versions and settings",
        [
            number(
                "Lost engines",
                "Times that the engine process ended and was started again.",
                total("octavo_engine_restarts_total"),
                steps=_MUST_NOT_HAPPEN,
                width=6,
            ),
            number(
                "KV integrity failures",
                "Idle checks of the KV cache's books that failed.",
                total("octavo_kv_cache_integrity_failures_total"),
                steps=_MUST_NOT_HAPPEN,
                width=6,
            ),
            number("KV blocks", "In all pools.", total("octavo_kv_blocks"), width=6),
            number(
                "Up for",
                "The server that was started last.",
                f"time() - max({selected('process_start_time_seconds', selector=SERVER_SELECTOR)})",
                unit="s",
                width=6,
            ),
            facts("Settings in force", "Of each server.", config, (*_NO_FACTS, "engine")),
            facts("Versions", "Of each server.", selected("octavo_build_info"), (*_NO_FACTS, "engine", "model_name")),
        ],
    )


def _queues() -> list[Sized]:
    return [
        lines(
            "Running and waiting",
            "Open requests as the server counts them, also while the engine hangs; sequences that run, that wait for "
            "room, or for a grammar to be compiled.",
            {
                "open requests": total("octavo_open_requests"),
                "running": total("vllm:num_requests_running"),
                "waiting for {{reason}}": total("vllm:num_requests_waiting_by_reason", by="reason"),
                "starving": total("octavo_num_requests_starving"),
            },
        ),
        lines(
            "Prompt tokens that wait",
            "Of prompts that have not been admitted: the work in the queue.",
            {"queued": total("octavo_num_queued_prompt_tokens")},
        ),
        lines(
            "Where a request's time goes",
            "Means: in the queue, until the first token, and from there to the last.",
            {
                "queue": mean_observed("vllm:request_queue_time_seconds"),
                "prefill": mean_observed("vllm:request_prefill_time_seconds"),
                "decode": mean_observed("vllm:request_decode_time_seconds"),
            },
            unit="s",
            stacked=True,
        ),
        lines(
            "Time in the queue",
            "Until the first admission; a preemption does not count.",
            {f"p{share * 100:g}": quantile(share, "vllm:request_queue_time_seconds") for share in (0.5, 0.95, 0.99)},
            unit="s",
        ),
        lines(
            "Preemptions",
            "Sequences in a second that gave up their blocks for others.",
            {"preemptions": rate("vllm:num_preemptions_total")},
            unit="ops",
        ),
        lines(
            "Tokens computed again",
            "What preemptions cost, in tokens of a second.",
            {
                "all": rate("octavo_recomputed_tokens_total"),
                "of prompts": rate("vllm:prompt_tokens_recomputed_total"),
            },
        ),
    ]


def _steps() -> list[Sized]:
    return [
        lines(
            "Busy, by part of a step",
            "Seconds of a second: what is missing to 1 the engine rested.",
            {"{{part}}": rate(_STEP_SECONDS, by="part")},
            unit="percentunit",
            stacked=True,
        ),
        lines(
            "Time of a step by part",
            "schedule: choosing tokens and blocks; execute: the model; update: taking it in; between: the rest.",
            {"{{part}}": quotient(rate(_STEP_SECONDS, by="part"), f"scalar({rate(_STEPS)})")},
            unit="s",
            stacked=True,
        ),
        distribution(
            "Tokens of a step",
            "Steps by the tokens that they computed: large batches use the machine better.",
            increase("vllm:iteration_tokens_total_bucket", by="le"),
        ),
        lines("Steps", "In a second.", {"steps": rate(_STEPS)}, unit="ops", width=12),
        lines(
            "Lateness of the event loop",
            "How late the process that speaks HTTP comes to what is due; above some 50 ms it is overloaded.",
            {f"p{share * 100:g}": quantile(share, _LAG) for share in (0.5, 0.95, 0.99)},
            unit="s",
            width=12,
        ),
    ]


def _blocks() -> list[Sized]:
    return [
        lines(
            "Blocks by state",
            "used: some sequence holds them; cached: none does, and they keep a prefix until needed; free: neither.",
            {"{{state}}": total("octavo_kv_blocks", by="state")},
            stacked=True,
        ),
        lines(
            "Usage",
            "Part of the blocks that sequences hold; of the host's too where blocks are swapped.",
            {"device": mean("vllm:kv_cache_usage_perc"), "host": mean("octavo_kv_host_usage_perc")},
            unit="percentunit",
            top=1,
        ),
        lines(
            "Waste",
            "Part of the slots in used blocks that hold no token.",
            {"empty slots": mean("octavo_kv_waste_perc")},
            unit="percentunit",
        ),
    ]


def _prefixes() -> list[Sized]:
    return [
        lines(
            "Prefix cache hit rate",
            "Part of the prompt tokens looked up that were found.",
            {"hits": quotient(rate(_HITS), rate(_LOOKED_UP))},
            unit="percentunit",
            top=1,
        ),
        lines(
            "Shared blocks",
            "Held by more than one sequence, and how many more would be needed without.",
            {
                "shared": total("octavo_kv_blocks_shared"),
                "saved": total("octavo_kv_blocks_saved"),
                "with a known prefix": total("octavo_kv_blocks_cached"),
            },
        ),
        lines(
            "Copy-on-write",
            "Shared blocks in a second that were copied before a write.",
            {"copied": rate("octavo_kv_blocks_copied_total")},
            unit="ops",
        ),
    ]


def _movements() -> list[Sized]:
    return [
        lines(
            "Evictions",
            "Cached blocks in a second given up for others: many of them mean that the cache is too small.",
            {"evicted": rate("octavo_kv_blocks_evicted_total")},
            unit="ops",
            width=12,
        ),
        lines(
            "Swapped blocks",
            "To host memory and back, in a second.",
            {
                "out": rate("octavo_kv_blocks_swapped_out_total"),
                "in": rate("octavo_kv_blocks_swapped_in_total"),
            },
            unit="ops",
            width=12,
        ),
    ]
