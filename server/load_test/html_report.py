"""The report as one HTML page: tables and plots, without scripts or anything from elsewhere, for a phone too."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape

from server.load_test.record import Record
from server.load_test.result import Result, client_facts
from server.load_test.summary import Summary
from server.load_test.svg_plots import Point, Series, plot
from server.load_test.tables import latencies, milliseconds, summary_rows

_MOST_BINS = 60
_LEAST_BIN_SECONDS = 0.5  # of fewer requests a rate says little
_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --soft: #566070; --back: #fff; --line: #dde2e9;
  --s0: #1f6feb; --s1: #b3540e; --s2: #1a7f4b; --s3: #8250df; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --text: #e6eaf0; --soft: #a3adba; --back: #14181e; --line: #2f3742;
  --s0: #6cb0ff; --s1: #f0a25c; --s2: #5fd394; --s3: #c9a6ff; --bad: #ff8f84; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 1rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
h1, p { overflow-wrap: anywhere; } p { margin: .3rem 0; } .soft { color: var(--soft); } .bad { color: var(--bad); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.facts td:first-child { white-space: normal; } .wrap td { white-space: normal; text-align: left; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--text); font-size: 13px; }
svg .title { font-weight: 600; font-size: 14px; } svg .small { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--line); } .limit { stroke: var(--bad); stroke-dasharray: 5 4; }
path { fill: none; stroke-width: 2; } .dots { stroke-width: 4; stroke-linecap: round; opacity: .55; }
.key { stroke-width: 4; }
.s0 { stroke: var(--s0); } .s1 { stroke: var(--s1); } .s2 { stroke: var(--s2); } .s3 { stroke: var(--s3); }
"""


def build_html(result: Result) -> str:
    """The whole page."""
    summary = result.outcome.summary
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Load test of {escape(str(result.server['model']))}</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>Load test of {escape(str(result.server['model']))}</h1>",
        *(f'<p class="soft">{escape(line)}</p>' for line in _facts(result)),
        *_search_section(result),
        "<h2>Latency in milliseconds, from when a request was due</h2>",
        _latency_table(summary),
        "<h2>The load</h2>",
        _table((), summary_rows(summary), css_class="facts"),
        *_error_section(summary),
        '<h2>Plots</h2><div class="plots">',
        *_plots(result.outcome.records, summary),
        "</div>",
        *(f"<h2>Notes</h2><ul>{_items(result.notes)}</ul>" for _ in range(bool(result.notes))),
        "</main></body></html>\n",
    ]
    return "".join(parts)


def _facts(result: Result) -> list[str]:
    client = client_facts()
    rate = result.outcome.rate
    load = result.load if rate is None else f"{result.load}; shown is the trial at {rate:.4g} sessions/s"
    return [
        f"{result.server['url']}, {result.server['endpoint']}, {result.began.isoformat(sep=' ', timespec='seconds')}",
        f"{load}. {result.prompts[:1].upper()}{result.prompts[1:]}. Seed {result.seed}.",
        f"Client: {client['system']}, {client['processors']} processors, Python {client['python']}.",
    ]


def _search_section(result: Result) -> list[str]:
    found = result.search
    if found is None:
        return []
    rows = [
        (
            f"{trial.rate:.4g}",
            f"{'at most ' if trial.is_given_up else ''}{trial.share:.1%}",
            "yes" if trial.is_kept else "given up" if trial.is_given_up else "no",
        )
        for trial in found.trials
    ]
    verdict = "No rate" if found.rate is None else f"{found.rate:.4g} sessions/s"
    broken = "" if found.broken_rate is None else f"; {found.broken_rate:.4g} do not"
    objective = escape(result.outcome.summary.objective)
    ordered = sorted((trial.rate, trial.share * 100) for trial in found.trials)
    return [
        f"<h2>Highest rate</h2><p><strong>{verdict}</strong> keep {objective}{broken}.</p>",
        '<div class="plots">',
        plot(
            "Requests served in time",
            "sessions per second",
            "%",
            [Series("share", ordered, "dots")],
            log_x=True,
            limits=[(f"{result.goal:.4g} of them are to be", 100 * result.goal)],
        ),
        plot(
            "Time to the first token, of trials that were not given up",
            "sessions per second",
            "seconds",
            [Series(name, _percentile_by_rate(result, name), "dots") for name in ("p50", "p90", "p99")],
            log_x=True,
            log_y=True,
        ),
        _table(("sessions/s", "in time", "kept"), rows),
        "</div>",
    ]


def _percentile_by_rate(result: Result, name: str) -> list[Point]:
    assert result.search is not None
    times = [
        (trial.rate, outcome.summary.ttft.percentiles[name])
        for trial, outcome in zip(result.search.trials, result.trials, strict=True)
        if not trial.is_given_up
    ]
    return [(rate, seconds) for rate, seconds in times if seconds is not None]


def _latency_table(summary: Summary) -> str:
    head = ("", "mean", *summary.ttft.percentiles, "most")
    rows = [
        (name, *(milliseconds(value) for value in (latency.mean, *latency.percentiles.values(), latency.most)))
        for name, latency in latencies(summary).items()
    ]
    return _table(head, rows)


def _error_section(summary: Summary) -> list[str]:
    if not summary.errors:
        return []
    rows = [(error.kind, f"{error.count:,}", error.example) for error in summary.errors]
    return ['<h2 class="bad">Errors</h2>', _table(("kind", "requests", "for example"), rows, css_class="wrap")]


def _plots(records: Sequence[Record], summary: Summary) -> list[str]:
    answered = [record for record in records if record.is_answered]
    ttft = [(record.due, record.ttft) for record in answered if record.ttft is not None]
    whole = [(record.due, record.end_to_end) for record in answered if record.end_to_end is not None]
    gaps = [gap for record in answered for gap in record.gaps]
    tpot = [record.tpot for record in answered if record.tpot is not None]
    width = max(summary.seconds / _MOST_BINS, _LEAST_BIN_SECONDS)
    due = _per_second([(record.due, 1) for record in records if record.error_kind != "unsent"], width)
    ends = _per_second([(record.ended or 0.0, 1) for record in answered], width)
    tokens = _per_second([item for record in records for item in _token_times(record)], width)
    return [
        plot(
            "Latency over time",
            "due at, seconds",
            "seconds",
            [Series("first token", sorted(ttft), "dots"), Series("whole answer", sorted(whole), "dots")],
            log_y=True,
        ),
        plot(
            "How many are as fast",
            "seconds",
            "% of samples",
            [
                Series("first token", _cdf([seconds for _, seconds in ttft])),
                Series("whole answer", _cdf([seconds for _, seconds in whole])),
                Series("per token", _cdf(tpot)),
                Series("gaps", _cdf(gaps)),
            ],
            log_x=True,
        ),
        plot(
            "Requests per second",
            "seconds",
            "requests/s",
            [Series("due", due, "steps"), Series("answered", ends, "steps")],
        ),
        plot("Output tokens per second", "seconds", "tokens/s", [Series("tokens", tokens, "steps")]),
        plot("Open requests", "seconds", "requests", [Series("open", _open_over_time(records), "steps")]),
    ]


def _cdf(values: Sequence[float]) -> list[Point]:
    """At most a few hundred points of the distribution."""
    ordered = sorted(values)
    num = len(ordered)
    places = range(num) if num <= 400 else [place * (num - 1) // 399 for place in range(400)]
    return [(ordered[place], 100 * (place + 1) / num) for place in places]


def _per_second(times: Iterable[tuple[float, float]], width: float) -> list[Point]:
    """Sums of weights in stretches of `width` seconds, per second; each stands at the end of its stretch."""
    bins: defaultdict[int, float] = defaultdict(float)
    for time, weight in times:
        bins[int(time / width)] += weight
    last = max(bins, default=-1)
    return [(0.0, bins[0] / width), *(((number + 1) * width, bins[number] / width) for number in range(last + 1))]


def _token_times(record: Record) -> list[tuple[float, float]]:
    """Each piece of an answer, with as many tokens as a piece has on average."""
    if not record.piece_times:
        return []
    weight = record.num_output_tokens / len(record.piece_times)
    return [(time, weight) for time in record.piece_times]


def _open_over_time(records: Sequence[Record]) -> list[Point]:
    changes = [
        change
        for record in records
        if record.sent is not None and record.ended is not None
        for change in ((record.due, 1), (record.ended, -1))
    ]
    num_open = 0
    points: list[Point] = [(0.0, 0.0)]
    for time, change in sorted(changes):
        num_open += change
        points.append((time, num_open))
    return points


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], css_class: str = "") -> str:
    top = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{css_class}">{top}{body}</table></div>'


def _items(texts: Iterable[str]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)
