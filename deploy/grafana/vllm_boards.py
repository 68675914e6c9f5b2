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

VLLM_BOARDS: Mapping[str, Mapping[str, Queries]] = {"vLLM": VLLM}
