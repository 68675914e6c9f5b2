"""What the boards that vLLM publishes ask of a server: PromQL by board and panel, as facts to check ours against.

Written from vLLM's examples/observability, where the boards themselves are; the variables are Grafana's.
"""

from collections.abc import Mapping, Sequence

Queries = Sequence[str]

_MODEL = 'model_name="$model_name"'
_OVER = "[$__rate_interval]"


def _percentiles_and_mean(histogram: str) -> Queries:
    quantiles = [
        f"histogram_quantile({share}, sum by(le) (rate({histogram}_bucket{{{_MODEL}}}{_OVER})))"
        for share in (0.99, 0.95, 0.9, 0.5)
    ]
    return [*quantiles, f"{_rate(f'{histogram}_sum')}\n/\n{_rate(f'{histogram}_count')}"]


def _rate(counter: str) -> str:
    return f"rate({counter}{{{_MODEL}}}{_OVER})"


def _increase(counter: str, by: str) -> str:
    return f"sum by({by}) (increase({counter}{{{_MODEL}}}{_OVER}))"


# prometheus_grafana/grafana.json: the one that most people have loaded.
VLLM: Mapping[str, Queries] = {
    "E2E Request Latency": _percentiles_and_mean("vllm:e2e_request_latency_seconds"),
    "Token Throughput": [_rate("vllm:prompt_tokens_total"), _rate("vllm:generation_tokens_total")],
    "Inter Token Latency": _percentiles_and_mean("vllm:inter_token_latency_seconds"),
    # Releases before 0.11 name the same panel and series so.
    "Time Per Output Token Latency": _percentiles_and_mean("vllm:time_per_output_token_seconds"),
    "Scheduler State": [f"vllm:num_requests_running{{{_MODEL}}}", f"vllm:num_requests_waiting{{{_MODEL}}}"],
    "Time To First Token Latency": _percentiles_and_mean("vllm:time_to_first_token_seconds"),
    "Cache Utilization": [f"vllm:kv_cache_usage_perc{{{_MODEL}}}", f"vllm:gpu_cache_usage_perc{{{_MODEL}}}"],
    "Request Prompt Length": [_increase("vllm:request_prompt_tokens_bucket", "le")],
    "Request Generation Length": [_increase("vllm:request_generation_tokens_bucket", "le")],
    "Finish Reason": [_increase("vllm:request_success_total", "finished_reason")],
    "Queue Time": [_rate("vllm:request_queue_time_seconds_sum")],
    "Requests Prefill and Decode Time": [
        _rate("vllm:request_prefill_time_seconds_sum"),
        _rate("vllm:request_decode_time_seconds_sum"),
    ],
    "Max Generation Token in Sequence Group": [_rate("vllm:request_max_num_generation_tokens_sum")],
}

# dashboards/grafana/vllm_overview.json.
_CHOSEN = 'job=~"$job", model_name=~"$model_name", instance=~"$instance"'
_HTTP_CHOSEN = 'job=~"$job", instance=~"$instance"'
_FIRST_TOKEN, _BETWEEN_TOKENS = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
_PER_TOKEN, _WHOLE_REQUEST = "vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds"
_ENDED = "vllm:request_success_total"


def _sum_rate(counter: str, more: str = "", by: str = "", chosen: str = _CHOSEN, over: str = _OVER) -> str:
    return f"sum{by and f' by ({by}) '}(rate({counter}{{{chosen}{more and f', {more}'}}}{over}))"


def _ratio(part: str, whole: str) -> str:
    return f"{part} / ({whole} > 0)"


def _mean(histogram: str) -> str:
    return _ratio(_sum_rate(f"{histogram}_sum"), _sum_rate(f"{histogram}_count"))


def _quantile(share: float, histogram: str, by: str = "le", over: str = _OVER) -> str:
    return f"histogram_quantile({share}, {_sum_rate(f'{histogram}_bucket', by=by, over=over)})"


def _quantiles(histogram: str, *shares: float) -> Queries:
    return [*(_quantile(share, histogram) for share in shares), _mean(histogram)]


def _hit_rate(cache: str) -> str:
    return _ratio(_sum_rate(f"vllm:{cache}_hits_total"), _sum_rate(f"vllm:{cache}_queries_total"))


def _share_of_range(histogram: str) -> str:
    buckets = f"sum by (le) (increase({histogram}_bucket{{{_CHOSEN}}}[$__range]))"
    return f"{buckets} / on () group_left () (sum(increase({histogram}_count{{{_CHOSEN}}}[$__range])) > 0)"


def _within(histogram: str, variable: str) -> str:
    return _ratio(_sum_rate(f"{histogram}_bucket", f'le="{variable}"'), _sum_rate(f"{histogram}_count"))


def _of_models() -> Queries:
    by, over = "model_name", "[$__range]"
    running = f"last_over_time(vllm:num_requests_running{{{_CHOSEN}}}{over})"
    failed = _sum_rate(_ENDED, 'finished_reason="error"', by=by, over=over)
    return [
        f"count by (model_name) (group by (model_name, instance) ({running}))",
        _sum_rate(_ENDED, by=by, over=over),
        _sum_rate("vllm:generation_tokens_total", by=by, over=over),
        *(_quantile(0.95, name, "le, model_name", over) for name in (_FIRST_TOKEN, _BETWEEN_TOKENS, _WHOLE_REQUEST)),
        _ratio(failed, _sum_rate(_ENDED, by=by, over=over)),
        f"max by (model_name) (max_over_time(vllm:kv_cache_usage_perc{{{_CHOSEN}}}{over}))",
        f"round(sum by (model_name) (increase(vllm:num_preemptions_total{{{_CHOSEN}}}{over})))",
    ]


_WAITING_BY_REASON = [
    f'sum(vllm:num_requests_waiting_by_reason{{{_CHOSEN}, reason="{reason}"}})' for reason in ("capacity", "deferred")
]
_USAGE = f"(vllm:kv_cache_usage_perc{{{_CHOSEN}}})"
_ANSWERS = _sum_rate("http_requests_total", chosen=_HTTP_CHOSEN)
_FAILURES = _sum_rate("http_requests_total", 'status="5xx"', chosen=_HTTP_CHOSEN)
_HTTP_SECONDS = [
    _sum_rate(f"http_request_duration_seconds_{part}", by="handler", chosen=_HTTP_CHOSEN) for part in ("sum", "count")
]

OVERVIEW: Mapping[str, Queries] = {
    "Requests / s": [_sum_rate(_ENDED)],
    "Input tok/s": [_sum_rate("vllm:prompt_tokens_total")],
    "Output tok/s": [_sum_rate("vllm:generation_tokens_total")],
    "5xx ratio": [f"({_FAILURES} or vector(0)) / ({_ANSWERS} > 0)"],
    "TTFT p95": [_quantile(0.95, _FIRST_TOKEN)],
    "ITL p95": [_quantile(0.95, _BETWEEN_TOKENS)],
    "E2E p95": [_quantile(0.95, _WHOLE_REQUEST)],
    "Unreachable": ['count(up{job=~"$job"} == 0) or vector(0)'],
    "Engines": [f"count(vllm:num_requests_running{{{_CHOSEN}}})"],
    "Running": [f"sum(vllm:num_requests_running{{{_CHOSEN}}})"],
    "Waiting": [f"sum(vllm:num_requests_waiting{{{_CHOSEN}}})"],
    "KV cache": [f"max{_USAGE}"],
    "Preemptions": [_sum_rate("vllm:num_preemptions_total")],
    "Prefix hits": [_hit_rate("prefix_cache")],
    "TTFT SLO": [_within(_FIRST_TOKEN, "$ttft_slo")],
    "TPOT SLO": [_within(_PER_TOKEN, "$tpot_slo")],
    "Per-model summary": _of_models(),
    "Time to first token (TTFT)": _quantiles(_FIRST_TOKEN, 0.5, 0.95, 0.99),
    "Inter-token latency (ITL)": _quantiles(_BETWEEN_TOKENS, 0.5, 0.95, 0.99),
    "Time per output token (TPOT)": _quantiles(_PER_TOKEN, 0.5, 0.95, 0.99),
    "End-to-end latency": _quantiles(_WHOLE_REQUEST, 0.5, 0.95, 0.99),
    "Queue time": _quantiles("vllm:request_queue_time_seconds", 0.5, 0.95, 0.99),
    "Mean time per request phase": [
        _mean(f"vllm:request_{phase}_time_seconds") for phase in ("queue", "prefill", "decode")
    ],
    "TTFT distribution": [_sum_rate(f"{_FIRST_TOKEN}_bucket", by="le")],
    "Inter-token latency distribution": [_sum_rate(f"{_BETWEEN_TOKENS}_bucket", by="le")],
    "End-to-end latency distribution": [_sum_rate(f"{_WHOLE_REQUEST}_bucket", by="le")],
    "Token throughput": [
        _sum_rate("vllm:prompt_tokens_total", by="model_name"),
        _sum_rate("vllm:generation_tokens_total", by="model_name"),
    ],
    "Finished requests by reason": [_sum_rate(_ENDED, by="finished_reason")],
    "Scheduler queue": [f"sum(vllm:num_requests_running{{{_CHOSEN}}})", *_WAITING_BY_REASON],
    "KV cache usage": [f"{function}{_USAGE}" for function in ("max", "avg", "min")],
    "Preemptions / s": [_sum_rate("vllm:num_preemptions_total")],
    "Tokens per engine step": _quantiles("vllm:iteration_tokens_total", 0.5, 0.99),
    "Cache hit rates": [_hit_rate(cache) for cache in ("prefix_cache", "external_prefix_cache", "mm_cache")],
    "Prompt tokens by source": [
        _sum_rate("vllm:prompt_tokens_by_source_total", f'source="{source}"')
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    ],
    "Prompt length": _quantiles("vllm:request_prompt_tokens", 0.5, 0.95, 0.99),
    "Output length": _quantiles("vllm:request_generation_tokens", 0.5, 0.95, 0.99),
    "Finish reason share": [
        f"{_sum_rate(_ENDED, by='finished_reason')} "
        f"/ ignoring (finished_reason) group_left () ({_sum_rate(_ENDED)} > 0)"
    ],
    "Prompt length distribution": [_share_of_range("vllm:request_prompt_tokens")],
    "Output length distribution": [_share_of_range("vllm:request_generation_tokens")],
    "HTTP requests by status": [_sum_rate("http_requests_total", by="status", chosen=_HTTP_CHOSEN)],
    "HTTP requests by endpoint": [_sum_rate("http_requests_total", by="handler", chosen=_HTTP_CHOSEN)],
    "HTTP mean duration by endpoint": [_ratio(*_HTTP_SECONDS)],
}

# dashboards/grafana/query_statistics.json.
_DEPLOYED = 'model_name=~"$Deployment_id"'
_DEPLOYED_PROMPTS = _sum_rate("vllm:prompt_tokens_total", chosen=_DEPLOYED)
_DEPLOYED_ENDS = _sum_rate(_ENDED, chosen=_DEPLOYED)


def _deployed_quantile(share: str, histogram: str) -> str:
    return f"histogram_quantile({share}, sum by(le, model_name) (rate({histogram}_bucket{{{_DEPLOYED}}}{_OVER})))"


QUERY_STATISTICS: Mapping[str, Queries] = {
    "Successful Requests Over Time": [_sum_rate(_ENDED, by="model_name", chosen=_DEPLOYED)],
    "Requests Avg Rate": [_DEPLOYED_ENDS],
    **{f"p{share[2:]} Latency": [_deployed_quantile(share, _WHOLE_REQUEST)] for share in ("0.50", "0.90", "0.99")},
    "Input Token Size Distribution": [
        _sum_rate("vllm:request_prompt_tokens_bucket", by="le, model_name", chosen=_DEPLOYED)
    ],
    **{
        f"Input Token Size p{share[2:]}": [_deployed_quantile(share, "vllm:request_prompt_tokens")]
        for share in ("0.50", "0.90", "0.99")
    },
    "Input Token Size Avg": [f"{_DEPLOYED_PROMPTS}\n/\n{_DEPLOYED_ENDS}"],
    "Input Tokens Over Time": [_sum_rate("vllm:prompt_tokens_total", by="model_name", chosen=_DEPLOYED)],
    "Input Tokens/Sec Avg": [_DEPLOYED_PROMPTS],
    "Output Tokens Over Time": [_sum_rate("vllm:generation_tokens_total", by="model_name", chosen=_DEPLOYED)],
    "Output Tokens/Sec Avg": [_sum_rate("vllm:generation_tokens_total", chosen=_DEPLOYED)],
}


# dashboards/grafana/performance_statistics.json, which chooses nothing.
def _statistics(histogram: str) -> Queries:
    sums = [f"{histogram}_{part}" for part in ("sum", "count")]
    return [
        " / ".join(f"rate({name}{_OVER})" for name in sums),
        *(
            f"histogram_quantile({share}, sum by(le) (rate({histogram}_bucket[{over}])))"
            for share in ("0.50", "0.90", "0.99")
            for over in ("$__range", "$__rate_interval")
        ),
        "(" + " / ".join(f"sum(increase({name}[$__range]))" for name in sums) + ")",
    ]


PERFORMANCE_STATISTICS: Mapping[str, Queries] = {
    "E2E Latency": _statistics(_WHOLE_REQUEST),
    "TTFT": _statistics(_FIRST_TOKEN),
    "ITL": _statistics(_BETWEEN_TOKENS),
    "TPS (Tokens Per Second) Over Time": [
        f"rate({counter}{_OVER})"
        for counter in ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:iteration_tokens_total_count")
    ],
}

VLLM_BOARDS: Mapping[str, Mapping[str, Queries]] = {
    "vLLM": VLLM,
    "vLLM overview": OVERVIEW,
    "vLLM query statistics": QUERY_STATISTICS,
    "vLLM performance statistics": PERFORMANCE_STATISTICS,
}
