"""What a load came to, in numbers: latencies, throughput, the share served in time, errors by kind. Plain values only.

Percentiles interpolate between samples, as numpy's default and other load tests do. Knows no server and no screen.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np

from server.load_test.objective import Objective
from server.load_test.record import Record

PERCENTS = (50.0, 75.0, 90.0, 95.0, 99.0)
_BUSY_PROCESSORS = 0.8  # of one: from here on the client may be what is measured
_LATE_SHARE = 0.1  # of the median time to the first token
_SHORT_SHARE = 0.9  # of the tokens that were asked for


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds, over all samples; None without samples."""

    num_samples: int
    mean: float | None
    deviation: float | None  # standard deviation
    least: float | None
    most: float | None
    percentiles: dict[str, float | None]  # "p50" -> seconds


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """One kind of failure."""

    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Summary:
    """One load. Tokens per second and requests per second are over `seconds`."""

    seconds: float  # from the start to the end of the last answer
    num_requests: int  # that were due
    num_answered: int
    num_sessions: int
    errors: tuple[ErrorCount, ...]
    offered_rate: float  # requests per second that were due, over the time in which they were
    answered_rate: float
    num_prompt_tokens: int  # of answered requests, by the server's count
    num_cached_tokens: int | None  # of them, from its cache; None: the server does not say
    num_output_tokens: int  # all that came, those of answers that failed later included
    output_tokens_by: str  # "usage", "pieces of text" or "usage and pieces of text"
    num_wanted_tokens: int  # that answered requests asked for at most
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    mean_open: float  # requests open at once, over time
    most_open: int
    ttft: Latency
    itl: Latency  # between pieces of text
    tpot: Latency
    end_to_end: Latency
    lateness: Latency  # of the client itself
    objective: str  # "" without one
    num_kept: int | None  # requests that were served within it
    kept_share: float | None
    goodput: float | None  # of them, per second
    client_processors: float  # that this process kept busy
    num_sent_again: int  # on a new connection, because the server had closed the kept one

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def summarise(
    records: Sequence[Record],
    objective: Objective,
    *,
    client_seconds: float = 0.0,
    num_sent_again: int = 0,
    percents: Sequence[float] = PERCENTS,
) -> Summary:
    """Sum up a load that is over."""
    answered = [record for record in records if record.is_answered]
    due = [record for record in records if record.error_kind != "unsent"]
    seconds = max((record.ended for record in records if record.ended is not None), default=0.0)
    per_second = 1 / seconds if seconds > 0 else 0.0
    num_prompt_tokens = sum(record.num_prompt_tokens or 0 for record in answered)
    num_output_tokens = sum(record.num_output_tokens for record in records)
    cached = [record.num_cached_tokens for record in answered if record.num_cached_tokens is not None]
    num_kept = sum(map(objective.is_kept, records)) if objective else None
    mean_open, most_open = _open_requests(records, seconds)

    def latency(values: Iterable[float | None]) -> Latency:
        return describe([value for value in values if value is not None], percents)

    return Summary(
        seconds=seconds,
        num_requests=len(records),
        num_answered=len(answered),
        num_sessions=len({record.session for record in records}),
        errors=_count_errors(records),
        offered_rate=_rate([record.due for record in due]),
        answered_rate=len(answered) * per_second,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=sum(cached) if cached else None,
        num_output_tokens=num_output_tokens,
        output_tokens_by=_counted_by(records),
        num_wanted_tokens=sum(record.max_tokens for record in answered),
        prompt_tokens_per_second=num_prompt_tokens * per_second,
        output_tokens_per_second=num_output_tokens * per_second,
        mean_open=mean_open,
        most_open=most_open,
        ttft=latency(record.ttft for record in answered),
        itl=describe(np.fromiter(chain.from_iterable(record.gaps for record in answered), np.float64), percents),
        tpot=latency(record.tpot for record in answered),
        end_to_end=latency(record.end_to_end for record in answered),
        lateness=latency(record.lateness for record in records),
        objective=objective.describe(),
        num_kept=num_kept,
        kept_share=None if num_kept is None else num_kept / max(1, len(records)),
        goodput=None if num_kept is None else num_kept * per_second,
        client_processors=client_seconds * per_second,
        num_sent_again=num_sent_again,
    )


def warnings_of(summary: Summary) -> list[str]:
    """What a reader of the numbers must know, such as that they say more of the client than of the server."""
    warnings = []
    if summary.client_processors > _BUSY_PROCESSORS:
        warnings.append(
            f"the client kept {summary.client_processors:.2f} processors busy, and one is all it can use: "
            "spread the load over several clients"
        )
    late, first = summary.lateness.percentiles["p99"], summary.ttft.percentiles["p50"]
    if late is not None and first is not None and late > _LATE_SHARE * first:
        warnings.append(
            f"1 % of requests were sent {late * 1000:.3g} ms or more after they were due; latencies contain that time"
        )
    if summary.num_answered and summary.num_output_tokens < _SHORT_SHARE * summary.num_wanted_tokens:
        warnings.append(
            "answers were shorter than asked for: the model ended them; --ignore-eos where the server has it"
        )
    return warnings


def describe(samples: "Sequence[float] | np.ndarray[Any, np.dtype[np.float64]]", percents: Sequence[float]) -> Latency:
    """Sum up samples of one latency."""
    names = [f"p{percent:g}" for percent in percents]
    if not len(samples):
        return Latency(0, None, None, None, None, dict.fromkeys(names))
    values = np.asarray(samples)
    found = np.percentile(values, percents)
    return Latency(
        len(values),
        float(values.mean()),
        float(values.std()),
        float(values.min()),
        float(values.max()),
        {name: float(value) for name, value in zip(names, found, strict=True)},
    )


def _count_errors(records: Iterable[Record]) -> tuple[ErrorCount, ...]:
    messages: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        if record.error_kind is not None:
            messages[record.error_kind][record.error_message or ""] += 1
    counts = [ErrorCount(kind, found.total(), found.most_common(1)[0][0]) for kind, found in messages.items()]
    return tuple(sorted(counts, key=lambda error: -error.count))


def _counted_by(records: Iterable[Record]) -> str:
    ways = {
        "pieces of text" if record.num_counted_tokens is None else "usage"
        for record in records
        if record.num_output_tokens
    }
    return " and ".join(sorted(ways, reverse=True))


def _rate(dues: Sequence[float]) -> float:
    """Arrivals per second: gaps, of which there is one less, over the time between the first and the last."""
    span = max(dues, default=0.0) - min(dues, default=0.0)
    return (len(dues) - 1) / span if span > 0 else 0.0


def _open_requests(records: Iterable[Record], seconds: float) -> tuple[float, int]:
    """Mean over time and the most at once, of requests that were due and not ended."""
    spans = [(record.due, record.ended) for record in records if record.sent is not None and record.ended is not None]
    # Ends come before starts at the same time: a user of a closed loop has one open at a time.
    changes = sorted([(due, 1) for due, _ in spans] + [(ended, -1) for _, ended in spans])
    now_open = most = 0
    for _, change in changes:
        now_open += change
        most = max(most, now_open)
    total = sum(ended - due for due, ended in spans)
    return (total / seconds if seconds > 0 else 0.0), most
