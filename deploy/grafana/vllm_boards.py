"""What the boards that vLLM publishes ask of a server: PromQL by board and panel, as facts to check ours against.

Written from vLLM's examples/observability, where the boards themselves are; the variables are Grafana's.
"""

from collections.abc import Mapping

from deploy.grafana.vllm_detail_boards import INSTANCES, KV_CACHE, SERVICE_STATUS, SPECULATIVE_DECODING
from deploy.grafana.vllm_queries import (
    BETWEEN_TOKENS,
    CHOSEN,
    ENDED,
    FIRST_TOKEN,
    OVER,
    PER_TOKEN,
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

_MODEL = 'model_name="$model_name"'


def _percentiles_and_mean(histogram: str) -> Queries:
    percentiles = [
        f"histogram_quantile({share}, sum by(le) (rate({histogram}_bucket{{{_MODEL}}}{OVER})))"
        for share in (0.99, 0.95, 0.9, 0.5)
    ]
    return [*percentiles, f"{_rate(f'{histogram}_sum')}\n/\n{_rate(f'{histogram}_count')}"]


def _rate(counter: str) -> str:
    return f"rate({counter}{{{_MODEL}}}{OVER})"


def _increase(counter: str, by: str) -> str:
    return f"sum by({by}) (increase({counter}{{{_MODEL}}}{OVER}))"


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
def _share_of_range(histogram: str) -> str:
    buckets = f"sum by (le) (increase({histogram}_bucket{{{CHOSEN}}}[$__range]))"
    return f"{buckets} / on () group_left () (sum(increase({histogram}_count{{{CHOSEN}}}[$__range])) > 0)"


def _within(histogram: str, variable: str) -> str:
    return ratio(sum_rate(f"{histogram}_bucket", f'le="{variable}"'), sum_rate(f"{histogram}_count"))


def _of_models() -> Queries:
    by, over = "model_name", "[$__range]"
    running = f"last_over_time(vllm:num_requests_running{{{CHOSEN}}}{over})"
    failed = sum_rate(ENDED, 'finished_reason="error"', by=by, over=over)
    return [
        f"count by (model_name) (group by (model_name, instance) ({running}))",
        sum_rate(ENDED, by=by, over=over),
        sum_rate("vllm:generation_tokens_total", by=by, over=over),
        *(quantile(0.95, name, "le, model_name", over) for name in (FIRST_TOKEN, BETWEEN_TOKENS, WHOLE_REQUEST)),
        ratio(failed, sum_rate(ENDED, by=by, over=over)),
        f"max by (model_name) (max_over_time(vllm:kv_cache_usage_perc{{{CHOSEN}}}{over}))",
        f"round(sum by (model_name) (increase(vllm:num_preemptions_total{{{CHOSEN}}}{over})))",
    ]


_USAGE = f"(vllm:kv_cache_usage_perc{{{CHOSEN}}})"
_ANSWERS = sum_rate("http_requests_total", chosen=SERVER_CHOSEN)
_FAILURES = sum_rate("http_requests_total", 'status="5xx"', chosen=SERVER_CHOSEN)
_HTTP_SECONDS = [
    sum_rate(f"http_request_duration_seconds_{part}", by="handler", chosen=SERVER_CHOSEN) for part in ("sum", "count")
]

OVERVIEW: Mapping[str, Queries] = {
    "Requests / s": [sum_rate(ENDED)],
    "Input tok/s": [sum_rate("vllm:prompt_tokens_total")],
    "Output tok/s": [sum_rate("vllm:generation_tokens_total")],
    "5xx ratio": [f"({_FAILURES} or vector(0)) / ({_ANSWERS} > 0)"],
    "TTFT p95": [quantile(0.95, FIRST_TOKEN)],
    "ITL p95": [quantile(0.95, BETWEEN_TOKENS)],
    "E2E p95": [quantile(0.95, WHOLE_REQUEST)],
    "Unreachable": ['count(up{job=~"$job"} == 0) or vector(0)'],
    "Engines": [f"count(vllm:num_requests_running{{{CHOSEN}}})"],
    "Running": [f"sum(vllm:num_requests_running{{{CHOSEN}}})"],
    "Waiting": [f"sum(vllm:num_requests_waiting{{{CHOSEN}}})"],
    "KV cache": [f"max{_USAGE}"],
    "Preemptions": [sum_rate("vllm:num_preemptions_total")],
    "Prefix hits": [hit_rate("prefix_cache")],
    "TTFT SLO": [_within(FIRST_TOKEN, "$ttft_slo")],
    "TPOT SLO": [_within(PER_TOKEN, "$tpot_slo")],
    "Per-model summary": _of_models(),
    "Time to first token (TTFT)": quantiles(FIRST_TOKEN, 0.5, 0.95, 0.99),
    "Inter-token latency (ITL)": quantiles(BETWEEN_TOKENS, 0.5, 0.95, 0.99),
    "Time per output token (TPOT)": quantiles(PER_TOKEN, 0.5, 0.95, 0.99),
    "End-to-end latency": quantiles(WHOLE_REQUEST, 0.5, 0.95, 0.99),
    "Queue time": quantiles("vllm:request_queue_time_seconds", 0.5, 0.95, 0.99),
    "Mean time per request phase": [
        mean(f"vllm:request_{phase}_time_seconds") for phase in ("queue", "prefill", "decode")
    ],
    "TTFT distribution": [sum_rate(f"{FIRST_TOKEN}_bucket", by="le")],
    "Inter-token latency distribution": [sum_rate(f"{BETWEEN_TOKENS}_bucket", by="le")],
    "End-to-end latency distribution": [sum_rate(f"{WHOLE_REQUEST}_bucket", by="le")],
    "Token throughput": [
        sum_rate("vllm:prompt_tokens_total", by="model_name"),
        sum_rate("vllm:generation_tokens_total", by="model_name"),
    ],
    "Finished requests by reason": [sum_rate(ENDED, by="finished_reason")],
    "Scheduler queue": [f"sum(vllm:num_requests_running{{{CHOSEN}}})", *WAITING_BY_REASON.values()],
    "KV cache usage": [f"{function}{_USAGE}" for function in ("max", "avg", "min")],
    "Preemptions / s": [sum_rate("vllm:num_preemptions_total")],
    "Tokens per engine step": quantiles("vllm:iteration_tokens_total", 0.5, 0.99),
    "Cache hit rates": [hit_rate(cache) for cache in ("prefix_cache", "external_prefix_cache", "mm_cache")],
    "Prompt tokens by source": [
        sum_rate("vllm:prompt_tokens_by_source_total", f'source="{source}"')
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    ],
    "Prompt length": quantiles("vllm:request_prompt_tokens", 0.5, 0.95, 0.99),
    "Output length": quantiles("vllm:request_generation_tokens", 0.5, 0.95, 0.99),
    "Finish reason share": [
        f"{sum_rate(ENDED, by='finished_reason')} / ignoring (finished_reason) group_left () ({sum_rate(ENDED)} > 0)"
    ],
    "Prompt length distribution": [_share_of_range("vllm:request_prompt_tokens")],
    "Output length distribution": [_share_of_range("vllm:request_generation_tokens")],
    "HTTP requests by status": [sum_rate("http_requests_total", by="status", chosen=SERVER_CHOSEN)],
    "HTTP requests by endpoint": [sum_rate("http_requests_total", by="handler", chosen=SERVER_CHOSEN)],
    "HTTP mean duration by endpoint": [ratio(*_HTTP_SECONDS)],
}

# dashboards/grafana/query_statistics.json.
_DEPLOYED = 'model_name=~"$Deployment_id"'
_DEPLOYED_PROMPTS = sum_rate("vllm:prompt_tokens_total", chosen=_DEPLOYED)
_DEPLOYED_ENDS = sum_rate(ENDED, chosen=_DEPLOYED)


def _deployed_quantile(share: str, histogram: str) -> str:
    return f"histogram_quantile({share}, sum by(le, model_name) (rate({histogram}_bucket{{{_DEPLOYED}}}{OVER})))"


QUERY_STATISTICS: Mapping[str, Queries] = {
    "Successful Requests Over Time": [sum_rate(ENDED, by="model_name", chosen=_DEPLOYED)],
    "Requests Avg Rate": [_DEPLOYED_ENDS],
    **{f"p{share[2:]} Latency": [_deployed_quantile(share, WHOLE_REQUEST)] for share in ("0.50", "0.90", "0.99")},
    "Input Token Size Distribution": [
        sum_rate("vllm:request_prompt_tokens_bucket", by="le, model_name", chosen=_DEPLOYED)
    ],
    **{
        f"Input Token Size p{share[2:]}": [_deployed_quantile(share, "vllm:request_prompt_tokens")]
        for share in ("0.50", "0.90", "0.99")
    },
    "Input Token Size Avg": [f"{_DEPLOYED_PROMPTS}\n/\n{_DEPLOYED_ENDS}"],
    "Input Tokens Over Time": [sum_rate("vllm:prompt_tokens_total", by="model_name", chosen=_DEPLOYED)],
    "Input Tokens/Sec Avg": [_DEPLOYED_PROMPTS],
    "Output Tokens Over Time": [sum_rate("vllm:generation_tokens_total", by="model_name", chosen=_DEPLOYED)],
    "Output Tokens/Sec Avg": [sum_rate("vllm:generation_tokens_total", chosen=_DEPLOYED)],
}


# dashboards/grafana/performance_statistics.json, which chooses nothing.
def _statistics(histogram: str) -> Queries:
    sums = [f"{histogram}_{part}" for part in ("sum", "count")]
    return [
        " / ".join(f"rate({name}{OVER})" for name in sums),
        *(
            f"histogram_quantile({share}, sum by(le) (rate({histogram}_bucket[{over}])))"
            for share in ("0.50", "0.90", "0.99")
            for over in ("$__range", "$__rate_interval")
        ),
        "(" + " / ".join(f"sum(increase({name}[$__range]))" for name in sums) + ")",
    ]


PERFORMANCE_STATISTICS: Mapping[str, Queries] = {
    "E2E Latency": _statistics(WHOLE_REQUEST),
    "TTFT": _statistics(FIRST_TOKEN),
    "ITL": _statistics(BETWEEN_TOKENS),
    "TPS (Tokens Per Second) Over Time": [
        f"rate({counter}{OVER})"
        for counter in ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:iteration_tokens_total_count")
    ],
}

VLLM_BOARDS: Mapping[str, Mapping[str, Queries]] = {
    "vLLM": VLLM,
    "vLLM overview": OVERVIEW,
    "vLLM instances": INSTANCES,
    "vLLM KV cache": KV_CACHE,
    "vLLM speculative decoding": SPECULATIVE_DECODING,
    "vLLM service status": SERVICE_STATUS,
    "vLLM query statistics": QUERY_STATISTICS,
    "vLLM performance statistics": PERFORMANCE_STATISTICS,
}
