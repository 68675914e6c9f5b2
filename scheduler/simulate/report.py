"""Sums up a simulation: plain numbers for a file, a table for a person.

Decides nothing and measures nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from scheduler.simulate.deployment import Deployment
from scheduler.simulate.measurements import QUANTILES, Distribution, distribution
from scheduler.simulate.replay import Replayed
from scheduler.simulate.traces import Trace


@dataclass(frozen=True, slots=True)
class Report:
    """One simulation. Seconds are simulated ones but for `wall_seconds`; shares are of 1."""

    trace: str
    notes: tuple[str, ...]
    cost: str
    num_replicas: int
    num_cards: int  # of all replicas
    num_blocks: int  # of one replica
    block_size: int
    num_requests: int
    num_answered: int
    num_refused: int
    num_unsent: int  # later turns of a session in which one was refused or dropped
    num_dropped: dict[str, int]  # by cause
    seconds: float  # from the trace's start to the last answer
    requests_per_second: float
    prompt_tokens_per_second: float  # cached ones included
    generated_tokens_per_second: float
    ttft: Distribution
    inter_token: Distribution
    end_to_end: Distribution
    queue: Distribution
    wait_seconds: dict[str, float]  # by reason, of all requests
    num_prompt_tokens: int
    num_generated_tokens: int
    hit_rate: float  # of the prompt tokens that were looked up
    hit_rate_limit: float  # what the trace itself allows an unlimited cache
    kv_usage: float  # blocks in use, over the time of the steps
    waste: float  # of the slots of blocks in use, those without a token
    num_running: float  # sequences that hold blocks, over the time of the steps
    utilization: float  # of the replicas' time, steps
    num_preemptions: int
    num_recomputed_tokens: int
    num_swapped_blocks: int  # out and in
    num_evicted_blocks: int
    num_steps: int
    wall_seconds: float  # that the simulation itself took

    def to_json(self) -> dict[str, Any]:
        """Plain values, with percentiles by name."""
        values = asdict(self)
        for name in ("ttft", "inter_token", "end_to_end", "queue"):
            values[name]["percentiles"] = {f"p{percent:g}": s for percent, s in values[name]["percentiles"]}
        return values


def build_report(
    trace: Trace, deployment: Deployment, replayed: Replayed, wall_seconds: float, percentile: float | None = None
) -> Report:
    """Sum up a replay; `percentile` is one more to compute of each latency."""
    measured = replayed.measurements
    stats = replayed.stats

    def total(name: str) -> int:
        return sum(getattr(each, name) for each in stats)

    seconds = max(measured.end, 1e-9)
    busy = max(measured.busy_seconds, 1e-9)
    used = max(measured.used_slot_seconds, 1e-9)
    return Report(
        trace=trace.name,
        notes=trace.notes,
        cost=deployment.cost.describe(),
        num_replicas=deployment.num_replicas,
        num_cards=deployment.num_replicas * deployment.num_cards,
        num_blocks=deployment.num_blocks,
        block_size=deployment.block_size,
        num_requests=trace.num_requests,
        num_answered=measured.num_answered,
        num_refused=measured.num_refused,
        num_unsent=measured.num_unsent,
        num_dropped=dict(measured.drops),
        seconds=measured.end,
        requests_per_second=measured.num_answered / seconds,
        prompt_tokens_per_second=measured.num_prompt_tokens / seconds,
        generated_tokens_per_second=measured.num_generated_tokens / seconds,
        ttft=distribution(measured.ttft, percentile),
        inter_token=distribution(measured.gap_seconds, percentile),
        end_to_end=distribution(measured.end_to_end, percentile),
        queue=distribution(measured.queue, percentile),
        wait_seconds=dict(measured.wait_seconds),
        num_prompt_tokens=measured.num_prompt_tokens,
        num_generated_tokens=measured.num_generated_tokens,
        hit_rate=total("num_prefix_hits") / max(1, total("num_prefix_queries")),
        hit_rate_limit=trace.hit_rate_limit(deployment.block_size),
        kv_usage=measured.used_slot_seconds / max(measured.slot_seconds, 1e-9),
        waste=max(0.0, 1 - measured.token_slot_seconds / used) if measured.used_slot_seconds else 0.0,
        num_running=measured.row_seconds / busy,
        utilization=measured.busy_seconds / seconds / deployment.num_replicas,
        num_preemptions=total("num_preemptions"),
        num_recomputed_tokens=total("num_recomputed_tokens"),
        num_swapped_blocks=total("num_swapped_out_blocks") + total("num_swapped_in_blocks"),
        num_evicted_blocks=total("num_evicted_blocks"),
        num_steps=total("num_steps"),
        wall_seconds=wall_seconds,
    )


def latency_table(report: Report, percentile: float | None = None) -> Table:
    """Percentiles of each latency."""
    percents = sorted({*QUANTILES, *(() if percentile is None else (percentile,))})
    table = Table("seconds", "mean", *(f"p{percent:g}" for percent in percents), "most", title="Latency")
    rows = {
        "queue": report.queue,
        "first token": report.ttft,
        "between tokens": report.inter_token,
        "whole answer": report.end_to_end,
    }
    for column in table.columns[1:]:
        column.justify = "right"
    for name, times in rows.items():
        numbers = (times.mean, *(times.percentile(percent) for percent in percents), times.most)
        table.add_row(name, *(f"{number:.4g}" for number in numbers))
    return table


def summary_table(report: Report) -> Table:
    """Everything that is one number."""
    table = Table("", "", title=f"{report.trace}: {report.num_requests:,} requests", show_header=False)
    table.columns[1].justify = "right"
    for name, value in _summary_rows(report):
        table.add_row(name, value)
    return table


def _summary_rows(report: Report) -> Sequence[tuple[str, str]]:
    dropped = ", ".join(f"{count:,} {cause}" for cause, count in sorted(report.num_dropped.items())) or "0"
    waits = sorted(report.wait_seconds.items(), key=lambda item: -item[1])
    return (
        ("replicas (cards)", f"{report.num_replicas} ({report.num_cards})"),
        ("KV blocks of a replica", f"{report.num_blocks:,} x {report.block_size} tokens"),
        ("answered", f"{report.num_answered:,}"),
        ("dropped", dropped),
        ("refused, never sent", f"{report.num_refused:,}, {report.num_unsent:,}"),
        ("simulated time", f"{report.seconds:,.1f} s in {report.wall_seconds:.1f} s"),
        ("requests", f"{report.requests_per_second:,.2f} /s"),
        ("prompt tokens", f"{report.prompt_tokens_per_second:,.0f} /s"),
        ("generated tokens", f"{report.generated_tokens_per_second:,.0f} /s"),
        ("prefix hit rate (limit of the trace)", f"{report.hit_rate:.3f} ({report.hit_rate_limit:.3f})"),
        ("KV blocks in use", f"{report.kv_usage:.1%}"),
        ("waste: slots in use without a token", f"{report.waste:.1%}"),
        ("running sequences", f"{report.num_running:,.1f}"),
        ("time in steps", f"{report.utilization:.1%}"),
        ("steps", f"{report.num_steps:,}"),
        ("preemptions", f"{report.num_preemptions:,}"),
        ("recomputed tokens, swapped blocks", f"{report.num_recomputed_tokens:,}, {report.num_swapped_blocks:,}"),
        ("evicted blocks", f"{report.num_evicted_blocks:,}"),
        (
            "waited for",
            ", ".join(f"{reason} {seconds:,.1f} s" for reason, seconds in waits if seconds > 0) or "nothing",
        ),
    )
