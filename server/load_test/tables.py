"""The rows of a report's tables, as texts for people: the same in a terminal and on a page. Draws nothing."""

from collections.abc import Sequence

from server.load_test.summary import Latency, Summary


def latencies(summary: Summary) -> dict[str, Latency]:
    """The latencies by their names for people."""
    return {
        "TTFT": summary.ttft,
        "ITL": summary.itl,
        "TPOT": summary.tpot,
        "end to end": summary.end_to_end,
        "sent late": summary.lateness,
    }


def summary_rows(summary: Summary) -> Sequence[tuple[str, str]]:
    """Everything that is one number."""
    cached = summary.num_cached_tokens
    rows = [
        ("requests", f"{summary.num_requests:,} in {summary.num_sessions:,} sessions"),
        ("answered", f"{summary.num_answered:,}"),
        ("failed", f"{sum(error.count for error in summary.errors):,}"),
        ("time", f"{summary.seconds:,.2f} s"),
        ("requests due", f"{summary.offered_rate:,.3g} /s"),
        ("requests answered", f"{summary.answered_rate:,.3g} /s"),
        ("prompt tokens", f"{summary.num_prompt_tokens:,} = {summary.prompt_tokens_per_second:,.0f} /s"),
        (
            "of them from the server's cache",
            "not told" if cached is None else _share(cached, summary.num_prompt_tokens),
        ),
        ("output tokens", f"{summary.num_output_tokens:,} = {summary.output_tokens_per_second:,.0f} /s"),
        ("counted by", summary.output_tokens_by or "nothing"),
        ("open at once, mean and most", f"{summary.mean_open:,.1f}, {summary.most_open:,}"),
        ("processors that the client kept busy", f"{summary.client_processors:.2f}"),
    ]
    if summary.num_sent_again:
        rows.append(("sent again on a new connection", f"{summary.num_sent_again:,}"))
    if summary.num_kept is not None and summary.kept_share is not None and summary.goodput is not None:
        rows.append((f"served with {summary.objective}", _share(summary.num_kept, summary.num_requests)))
        rows.append(("goodput", f"{summary.goodput:,.3g} requests/s"))
    return rows


def _share(part: int, whole: int) -> str:
    return f"{part:,} = {part / max(1, whole):.1%}"


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds, in three digits or whole."""
    if seconds is None:
        return "-"
    value = seconds * 1000
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
