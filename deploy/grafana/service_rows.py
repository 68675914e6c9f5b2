"""The rows of the board that tell what users of the service get: rates, latencies, errors, tokens, HTTP, by key.

Each query is of one server's series, as docs/metrics.md describes them.
"""

from deploy.grafana.panels import Row, Sized, bars, distribution, lines, number
from deploy.grafana.queries import (
    RECORDED_SELECTOR,
    SERVER_SELECTOR,
    increase,
    mean_observed,
    quantile,
    quotient,
    rate,
    selected,
    share_within,
    total,
)

_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_FIRST_ANSWER = "vllm:time_to_first_token_seconds"
_BETWEEN_TOKENS = "vllm:inter_token_latency_seconds"
_WHOLE_REQUEST = "vllm:e2e_request_latency_seconds"
_FEW_ERRORS = ((None, "green"), (0.001, "orange"), (0.01, "red"))
_MOSTLY_KEPT = ((None, "red"), (0.95, "orange"), (0.99, "green"))


def service_row() -> Row:
    """At a glance, and then over time: are requests answered, and how fast?"""
    return Row("Service", [*_at_a_glance(), *_latencies(), _ends(), _errors(), _promises()])


def objective_row() -> Row:
    """How fast the error budgets of the objectives are being spent, as the alerts reckon it; 1 just lasts 30 days."""
    budget = "on (slo) group_left () octavo:slo_budget"
    windows = {"1h": "Budget burnt in an hour", "6h": "Budget burnt in six hours", "3d": "Budget burnt in three days"}
    missed = {window: selected(f"octavo:slo_bad:ratio_rate{window}", selector=RECORDED_SELECTOR) for window in windows}
    return Row(
        "Objectives",
        [
            lines(
                title,
                "Times as fast as a budget for 30 days allows: what misses its objective, by what may. "
                "The objectives stand in Prometheus's rules.",
                {"{{slo}}": f"max by (slo) ({missed[window]} / {budget})"},
            )
            for window, title in windows.items()
        ],
    )


def token_row() -> Row:
    """How many tokens come in and go out, and how they spread over requests."""
    return Row(
        "Tokens",
        [
            lines(
                "Tokens per second",
                "As `usage` tells them: prompts with what was cached, and answers.",
                {"prompt": rate("vllm:prompt_tokens_total"), "generated": rate("vllm:generation_tokens_total")},
            ),
            lines(
                "Prompt tokens by source",
                "Computed here, or found in the prefix cache.",
                {"{{source}}": rate("vllm:prompt_tokens_by_source_total", by="source")},
                stacked=True,
            ),
            lines(
                "Mean tokens of a request",
                "Of its prompt, of its answer, and how many it allowed.",
                {
                    "prompt": mean_observed("vllm:request_prompt_tokens"),
                    "answer": mean_observed("vllm:request_generation_tokens"),
                    "max_tokens": mean_observed("vllm:request_params_max_tokens"),
                },
            ),
            distribution(
                "Length of prompts", "Requests by tokens.", increase("vllm:request_prompt_tokens_bucket", by="le")
            ),
            distribution(
                "Length of answers", "Sequences by tokens.", increase("vllm:request_generation_tokens_bucket", by="le")
            ),
            distribution("n", "Sequences that a request asks for.", increase("vllm:request_params_n_bucket", by="le")),
        ],
    )


def fairness_row() -> Row:
    """Who has how much of the server: by the names of keys, of which the first 50 are told apart."""
    return Row(
        "Fairness by key",
        [
            lines(
                "Generated tokens per second by key",
                "`none` needs no key; `other` are all keys after the first 50.",
                {"{{key}}": rate("octavo_key_generation_tokens_total", by="key")},
                stacked=True,
            ),
            lines(
                "Prompt tokens per second by key",
                "Cached ones included.",
                {"{{key}}": rate("octavo_key_prompt_tokens_total", by="key")},
                stacked=True,
            ),
            lines(
                "Requests per second by key",
                "However they ended.",
                {"{{key}}": rate("octavo_key_requests_total", by="key")},
                stacked=True,
            ),
            lines(
                "Time in the queue by key",
                "Mean over the prompts that ended, until their first admission.",
                {
                    "{{key}}": quotient(
                        rate("octavo_key_queue_seconds_total", by="key"), rate("octavo_key_prompts_total", by="key")
                    )
                },
                unit="s",
                width=12,
            ),
            lines(
                "Preemptions by key",
                "Times in a second that a sequence of a key gave up its blocks for others.",
                {"{{key}}": rate("octavo_key_preemptions_total", by="key")},
                unit="ops",
                stacked=True,
                width=12,
            ),
            bars(
                "Share of generated tokens by key",
                "In the window of a point: who is being served now.",
                {
                    "{{key}}": quotient(
                        rate("octavo_key_generation_tokens_total", by="key"),
                        f"scalar({rate('octavo_key_generation_tokens_total')})",
                    )
                },
                unit="percentunit",
                width=12,
            ),
            bars(
                "Tokens since the start by key",
                "Prompts and answers.",
                {
                    "{{key}}": f"{total('octavo_key_prompt_tokens_total', by='key')} + "
                    f"{total('octavo_key_generation_tokens_total', by='key')}"
                },
                width=12,
            ),
        ],
    )


def http_row() -> Row:
    """The server's answers by route; these series have no model."""
    return Row(
        "HTTP",
        [
            lines(
                "Answers per second by route",
                "Without those of /health, /metrics and the dashboard.",
                {"{{handler}}": rate("http_requests_total", by="handler", selector=SERVER_SELECTOR)},
                unit="reqps",
            ),
            lines(
                "Answers per second by class of status",
                "4xx are callers' mistakes and refusals; 5xx are the server's.",
                {"{{status}}": rate("http_requests_total", by="status", selector=SERVER_SELECTOR)},
                unit="reqps",
                stacked=True,
            ),
            lines(
                "Duration by route, p95",
                "From a request's first byte to its answer's last; streams last as long as their answers.",
                {"{{handler}}": quantile(0.95, "http_request_duration_seconds", "handler", SERVER_SELECTOR)},
                unit="s",
            ),
            lines(
                "Bytes per second",
                "Of the bodies of requests and answers.",
                {
                    "requests": rate("http_request_size_bytes_sum", selector=SERVER_SELECTOR),
                    "answers": rate("http_response_size_bytes_sum", selector=SERVER_SELECTOR),
                },
                unit="Bps",
                width=12,
            ),
            lines(
                "Answers with an error by status",
                "429: the queue or a key's limit is full. 499: the client left. 503: the engine is not ready.",
                {"{{code}}": rate("octavo_http_errors_total", by="code")},
                unit="reqps",
                width=12,
            ),
        ],
    )


def _at_a_glance() -> list[Sized]:
    errors = rate("http_requests_total", 'status="5xx"', selector=SERVER_SELECTOR)
    return [
        number(
            "Ready",
            "Whether all chosen engines serve new requests.",
            f"min({selected('octavo_engine_ready')})",
            steps=((None, "red"), (1, "green")),
            texts={"0": ("No", "red"), "1": ("Yes", "green")},
        ),
        number(
            "Alerts that fire",
            "Of the rules that Prometheus evaluates.",
            'count(ALERTS{alertstate="firing"}) or vector(0)',
            steps=((None, "green"), (1, "red")),
        ),
        number("Requests", "Sequences that ended, in a second.", rate("vllm:request_success_total"), unit="reqps"),
        number("Generated", "Tokens in a second.", rate("vllm:generation_tokens_total")),
        number("First token, p95", "From arrival.", quantile(0.95, _FIRST_ANSWER), unit="s"),
        number("Between tokens, p95", "Of one sequence.", quantile(0.95, _BETWEEN_TOKENS), unit="s"),
        number(
            "Errors",
            "Part of all answers that are the server's fault (5xx).",
            quotient(errors, rate("http_requests_total", selector=SERVER_SELECTOR)),
            unit="percentunit",
            steps=_FEW_ERRORS,
        ),
        number(
            "Within the promise",
            "Part of sequences whose first token came within the chosen time.",
            share_within(_FIRST_ANSWER, "$first_token_seconds"),
            unit="percentunit",
            steps=_MOSTLY_KEPT,
        ),
    ]


def _latencies() -> list[Sized]:
    said = {
        "Time to first token": (_FIRST_ANSWER, "From a request's arrival, tokenising and waiting included."),
        "Time between tokens": (_BETWEEN_TOKENS, "As they leave the server, for each sequence."),
        "Time of a whole request": (_WHOLE_REQUEST, "From its arrival to its end, however it ended."),
    }
    return [
        lines(
            title,
            description,
            {name: quantile(share, series) for name, share in _PERCENTILES.items()} | {"mean": mean_observed(series)},
            unit="s",
        )
        for title, (series, description) in said.items()
    ]


def _ends() -> Sized:
    return lines(
        "Ended sequences by reason",
        "stop and length are answers; abort: the client left; error: the engine or the request failed.",
        {"{{finished_reason}}": rate("vllm:request_success_total", by="finished_reason")},
        unit="reqps",
        stacked=True,
    )


def _errors() -> Sized:
    return lines(
        "Dropped requests by cause",
        "Refused for a full queue, or ended because they waited or ran for too long.",
        {"{{cause}}": rate("octavo_requests_dropped_total", by="cause")},
        unit="reqps",
        stacked=True,
    )


def _promises() -> Sized:
    return lines(
        "Within the promises",
        "Part of first tokens, and of later ones, that came within the times chosen above.",
        {
            "first token within ${first_token_seconds} s": share_within(_FIRST_ANSWER, "$first_token_seconds"),
            "next token within ${next_token_seconds} s": share_within(_BETWEEN_TOKENS, "$next_token_seconds"),
        },
        unit="percentunit",
        top=1,
    )
