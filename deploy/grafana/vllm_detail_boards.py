"""What the boards ask that vLLM publishes beside its overview: instances, KV cache, speculation, service status.

Facts of vLLM's examples/observability, like those of vllm_boards.py. Left out are the rows that are folded away there
since they need a feature of vLLM's own: sampled blocks, FLOPs, what sleeping took, and connectors to other KV stores.
"""

from collections.abc import Mapping

from deploy.grafana.vllm_queries import (
    BETWEEN_TOKENS,
    CHOSEN,
    ENDED,
    FIRST_TOKEN,
    SERVER_CHOSEN,
    WAITING_BY_REASON,
    WHOLE_REQUEST,
    Queries,
    hit_rate,
    mean,
    quantile,
    quantiles,
    ratio,
    sum_rate,
)

Panels = Mapping[str, Queries]

_ENGINE, _INSTANCE = "instance, engine", "instance"
_STEPS = "vllm:iteration_tokens_total"
_PREEMPTED = "vllm:num_preemptions_total"
_PROMPT, _GENERATED = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"


def _gauge(function: str, name: str, by: str = "") -> str:
    return f"{function}{by and f' by ({by}) '}({name}{{{CHOSEN}}})"


def _by_engine(panels: Panels) -> Panels:
    """As boards ask that let one choose an engine too."""
    chosen = f'{CHOSEN}, engine=~"$engine"'
    return {panel: [query.replace(CHOSEN, chosen) for query in queries] for panel, queries in panels.items()}


def _instance_table() -> Queries:
    by, over = "model_name, instance", "[5m]"
    servers = f"group by (job, instance, model_name) (vllm:num_requests_running{{{CHOSEN}}})"
    started = f"(time() - process_start_time_seconds{{{SERVER_CHOSEN}}})"
    return [
        _gauge("count", "vllm:num_requests_running", by),
        _gauge("sum", "vllm:num_requests_running", by),
        _gauge("sum", "vllm:num_requests_waiting", by),
        _gauge("max", "vllm:kv_cache_usage_perc", by),
        sum_rate(ENDED, by=by, over=over),
        sum_rate(_GENERATED, by=by, over=over),
        *(quantile(0.95, name, f"le, {by}", over) for name in (FIRST_TOKEN, BETWEEN_TOKENS)),
        sum_rate(_PREEMPTED, by=by, over=over),
        f"max by ({by}) ({started} * on (job, instance) group_left (model_name) {servers})",
    ]


# dashboards/grafana/vllm_instances.json.
INSTANCES = _by_engine(
    {
        "Instances": _instance_table(),
        "Running requests": [_gauge("sum", "vllm:num_requests_running", _ENGINE)],
        "Waiting requests": [_gauge("sum", "vllm:num_requests_waiting", _ENGINE)],
        "KV cache usage": [_gauge("max", "vllm:kv_cache_usage_perc", _ENGINE)],
        "Requests / s": [sum_rate(ENDED, by=_INSTANCE)],
        "Input tokens / s": [sum_rate(_PROMPT, by=_ENGINE)],
        "Output tokens / s": [sum_rate(_GENERATED, by=_ENGINE)],
        "TTFT p95": [quantile(0.95, FIRST_TOKEN, "le, instance")],
        "Inter-token latency p95": [quantile(0.95, BETWEEN_TOKENS, "le, instance")],
        "E2E latency p95": [quantile(0.95, WHOLE_REQUEST, "le, instance")],
        "Mean queue time": [mean("vllm:request_queue_time_seconds", _INSTANCE)],
        "Engine steps / s": [sum_rate(f"{_STEPS}_count", by=_ENGINE)],
        "Mean tokens per engine step": [mean(_STEPS, _ENGINE)],
        "Preemptions / s": [sum_rate(_PREEMPTED, by=_ENGINE)],
        "Waiting requests by reason": [_gauge("sum", "vllm:num_requests_waiting_by_reason", f"{_ENGINE}, reason")],
        "Prefix cache hit rate": [hit_rate("prefix_cache", _ENGINE)],
        "CPU usage": [sum_rate("process_cpu_seconds_total", by=_INSTANCE, chosen=SERVER_CHOSEN)],
        "Resident memory": [f"sum by (instance) (process_resident_memory_bytes{{{SERVER_CHOSEN}}})"],
        "Open file descriptors": [
            " / ".join(f"sum by (instance) (process_{kind}_fds{{{SERVER_CHOSEN}}})" for kind in ("open", "max"))
        ],
        "Cache configuration": [f'vllm:cache_config_info{{{SERVER_CHOSEN}, engine=~"$engine"}}'],
        "LoRA adapters": [f"topk by (job, instance) (1, vllm:lora_requests_info{{{SERVER_CHOSEN}}})"],
        "Engine sleep state": [
            f'(1 - max by ({_ENGINE}) (vllm:engine_sleep_state{{{CHOSEN}, sleep_state="awake"}}))'
            f' * (1 + max by ({_ENGINE}) (vllm:engine_sleep_state{{{CHOSEN}, sleep_state="discard_all"}}))'
        ],
    }
)

# dashboards/grafana/vllm_kv_cache.json.
KV_CACHE = _by_engine(
    {
        "Max KV cache usage": [_gauge("max", "vllm:kv_cache_usage_perc")],
        "Mean KV cache usage": [_gauge("avg", "vllm:kv_cache_usage_perc")],
        "Prefix cache hit rate": [hit_rate("prefix_cache")],
        "Cached prompt tokens": [ratio(sum_rate("vllm:prompt_tokens_cached_total"), sum_rate(_PROMPT))],
        "Preemptions / s": [sum_rate(_PREEMPTED)],
        "Waiting for capacity": [WAITING_BY_REASON["capacity"]],
        "KV cache usage by engine": [_gauge("max", "vllm:kv_cache_usage_perc", _ENGINE)],
        "Scheduler queue": [_gauge("sum", "vllm:num_requests_running"), *WAITING_BY_REASON.values()],
        "Preemptions / s by engine": [sum_rate(_PREEMPTED, by=_ENGINE)],
        "Prompt tokens by source": [
            sum_rate("vllm:prompt_tokens_by_source_total", f'source="{source}"')
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        ],
        "Prefix cache hit rate by engine": [hit_rate("prefix_cache", _ENGINE)],
        "Cached prompt tokens by tier": [sum_rate("vllm:prompt_tokens_cached_by_source_total", by="source")],
        "Prompt and computed tokens per request": [
            mean(f"vllm:request_{name}") for name in ("prompt_tokens", "prefill_kv_computed_tokens")
        ],
        "Cache hit rates": [hit_rate(cache) for cache in ("prefix_cache", "external_prefix_cache", "mm_cache")],
    }
)

# dashboards/grafana/vllm_speculative_decoding.json.
_DRAFTS, _DRAFTED, _ACCEPTED = (
    f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")
)


def _accepted_of(whole: str, by: str = "") -> str:
    return ratio(sum_rate(_ACCEPTED, by=by), sum_rate(whole, by=by))


SPECULATIVE_DECODING = _by_engine(
    {
        "Draft acceptance rate": [_accepted_of(_DRAFTED), _accepted_of(_DRAFTED, "model_name")],
        "Acceptance length": [f"1 + {_accepted_of(_DRAFTS)}"],
        "Accepted tokens / s": [sum_rate(_ACCEPTED)],
        "Drafts / s": [sum_rate(_DRAFTS)],
        "Output from drafts": [_accepted_of(_GENERATED)],
        "Mean acceptance length": [f"1 + {_accepted_of(_DRAFTS, 'model_name')}"],
        "Acceptance rate by draft position": [
            f"{sum_rate('vllm:spec_decode_num_accepted_tokens_per_pos_total', by='position')} "
            f"/ on () group_left () ({sum_rate(_DRAFTS)} > 0)"
        ],
        "Draft acceptance rate by engine": [_accepted_of(_DRAFTED, _ENGINE)],
        "Draft tokens / s": [
            sum_rate(_DRAFTED),
            sum_rate(_ACCEPTED),
            f"{sum_rate(_DRAFTED)} - {sum_rate(_ACCEPTED)}",
        ],
        "Inter-token latency": quantiles(BETWEEN_TOKENS, 0.5, 0.95, 0.99),
    }
)

# dashboards/grafana/vllm_service_status.json; each number again as a line over time, which has no title there.
_RECENT = "[5m]"
_STATUS = f'(2 - (max(vllm:engine_sleep_state{{{CHOSEN}, sleep_state="awake"}}) == bool 0)) or vector(0)'
_RUNNING = f"sum(avg_over_time(vllm:num_requests_running{{{CHOSEN}}}{_RECENT}))"
_RECENTLY_ENDED = sum_rate(ENDED, over=_RECENT)
_RECENTLY_FAILED = sum_rate(ENDED, 'finished_reason="error"', over=_RECENT)
_OF_SERVICE = {
    "Response time": quantile(0.5, FIRST_TOKEN, over=_RECENT),
    "Output speed": ratio(sum_rate(_GENERATED, over=_RECENT), _RUNNING),
    "Success rate": f"1 - ({ratio(_RECENTLY_FAILED, _RECENTLY_ENDED)})",
    "Requests / min": f"60 * {_RECENTLY_ENDED}",
}
SERVICE_STATUS: Panels = {
    "Status": [_STATUS],
    **{
        title: [query, f"({query}) and on () {_gauge('count', 'vllm:num_requests_running')}"]
        for title, query in _OF_SERVICE.items()
    },
}
