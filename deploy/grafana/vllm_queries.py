"""PromQL as the boards that vLLM publishes are written: what they choose, rates, ratios, percentiles.

Facts of vLLM's examples/observability; the variables are Grafana's. Knows no board.
"""

from collections.abc import Sequence

Queries = Sequence[str]

OVER = "[$__rate_interval]"
CHOSEN = 'job=~"$job", model_name=~"$model_name", instance=~"$instance"'
SERVER_CHOSEN = 'job=~"$job", instance=~"$instance"'
FIRST_TOKEN, BETWEEN_TOKENS = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
PER_TOKEN, WHOLE_REQUEST = "vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds"
ENDED = "vllm:request_success_total"


def sum_rate(counter: str, more: str = "", by: str = "", chosen: str = CHOSEN, over: str = OVER) -> str:
    """How much counters grow in a second, of what was chosen and `more`."""
    return f"sum{by and f' by ({by}) '}(rate({counter}{{{chosen}{more and f', {more}'}}}{over}))"


def ratio(part: str, whole: str) -> str:
    """A part of a whole; nothing where there was nothing."""
    return f"{part} / ({whole} > 0)"


def mean(histogram: str, by: str = "") -> str:
    """Of what a histogram saw."""
    return ratio(sum_rate(f"{histogram}_sum", by=by), sum_rate(f"{histogram}_count", by=by))


def quantile(share: float, histogram: str, by: str = "le", over: str = OVER) -> str:
    """A percentile of what a histogram saw."""
    return f"histogram_quantile({share}, {sum_rate(f'{histogram}_bucket', by=by, over=over)})"


def quantiles(histogram: str, *shares: float) -> Queries:
    """Percentiles and the mean."""
    return [*(quantile(share, histogram) for share in shares), mean(histogram)]


def hit_rate(cache: str, by: str = "") -> str:
    """What was found in a cache, of what was looked up."""
    return ratio(sum_rate(f"vllm:{cache}_hits_total", by=by), sum_rate(f"vllm:{cache}_queries_total", by=by))


WAITING_BY_REASON = {
    reason: f'sum(vllm:num_requests_waiting_by_reason{{{CHOSEN}, reason="{reason}"}})'
    for reason in ("capacity", "deferred")
}
