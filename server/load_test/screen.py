"""What a person sees in the terminal: how the load goes while it runs, and tables of what it came to.

Draws at most twice a second, in a thread of its own, so that the clock is hardly disturbed. Decides nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from server.load_test.load import Load
from server.load_test.record import Record
from server.load_test.search import Found
from server.load_test.summary import Summary, describe
from server.load_test.tables import latencies, milliseconds, summary_rows

_NUM_RECENT = 200
_LINE_SECONDS = 10.0
_BARS = "▁▂▃▄▅▆▇█"
_NUM_BARS = 40


class Progress:
    """Follows one load."""

    def __init__(self, title: str, num_requests: int | None, duration: float | None) -> None:
        """`num_requests` in all, or None where the clock ends the load after `duration` seconds."""
        self._title = title
        self._num_requests = num_requests
        self._duration = duration
        self._load: Load | None = None
        self._ended: list[Record] = []
        self._num_failed = 0
        self._num_tokens = 0

    def take(self, record: Record) -> None:
        """A request has ended."""
        self._ended.append(record)
        self._num_failed += not record.is_answered
        self._num_tokens += record.num_output_tokens

    @asynccontextmanager
    async def shown(self, load: Load, console: Console, *, is_shown: bool) -> AsyncIterator[None]:
        """Show the load while the block runs: a table in a terminal, a line from time to time elsewhere."""
        self._load = load
        if not is_shown:
            yield
        elif console.is_terminal:
            with Live(get_renderable=self.render, console=console, refresh_per_second=2, transient=True):
                yield
        else:
            task = asyncio.create_task(self._print_lines(console))
            try:
                yield
            finally:
                task.cancel()

    async def _print_lines(self, console: Console) -> None:
        while True:
            await asyncio.sleep(_LINE_SECONDS)
            console.print(self.line(), markup=False, highlight=False, soft_wrap=True)

    def line(self) -> str:
        """The state in one line."""
        return f"{self._title}: " + ", ".join(f"{value} {name}" for name, value in self._facts().items())

    def render(self) -> RenderableType:
        """The state as a table."""
        table = Table(title=self._title, show_header=False, min_width=60)
        table.add_column()
        table.add_column(justify="right")
        for name, value in self._facts().items():
            table.add_row(name, value)
        recent = [record.ttft for record in self._ended[-_NUM_RECENT:] if record.ttft is not None]
        if recent:
            latency = describe(recent, (50.0, 99.0))
            middle, late = latency.percentiles.values()
            table.add_row(f"first token, last {len(recent)}: p50, p99", f"{_time(middle)}, {_time(late)}")
            table.add_row("", bars(recent[-_NUM_BARS:]))
        return table

    def _facts(self) -> dict[str, str]:
        load = self._load
        assert load is not None, "shown before there is a load"
        seconds = max(0.0, load.now) if load.start else 0.0
        total = "" if self._num_requests is None else f" of {self._num_requests:,}"
        limit = "" if self._duration is None else f" of {self._duration:g}"
        return {
            "seconds": f"{seconds:.0f}{limit}",
            "due": f"{load.num_due:,}{total}",
            "open": f"{len(load.open):,}",
            "ended": f"{len(self._ended):,}",
            "failed": f"{self._num_failed:,}",
            "tokens/s": f"{self._num_tokens / max(seconds, 1e-9):,.0f}" if seconds else "0",
        }


def bars(values: Sequence[float]) -> str:
    """Values as bars of text, from 0 to the largest."""
    most = max(values, default=0.0)
    return "".join(
        _BARS[min(len(_BARS) - 1, int(value / most * len(_BARS)))] if most > 0 else _BARS[0] for value in values
    )


def summary_table(summary: Summary, title: str) -> Table:
    """Everything that is one number."""
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in summary_rows(summary):
        table.add_row(name, value)
    return table


def latency_table(summary: Summary) -> Table:
    """Percentiles of each latency, in milliseconds."""
    names = list(summary.ttft.percentiles)
    title = "Latency in milliseconds, from when a request was due"
    table = Table("", "n", "mean", *names, "most", box=box.SIMPLE_HEAD, padding=0, title=title)
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for name, latency in latencies(summary).items():
        numbers = (latency.mean, *latency.percentiles.values(), latency.most)
        table.add_row(name, f"{latency.num_samples:,}", *(milliseconds(number) for number in numbers))
    return table


def error_table(summary: Summary) -> Table:
    """Failures by kind."""
    table = Table("error", "requests", "for example", title="Errors")
    table.columns[1].justify = "right"
    for error in summary.errors:
        table.add_row(error.kind, f"{error.count:,}", error.example)
    return table


def search_table(found: Found) -> Table:
    """The trials of a search in their order."""
    table = Table("sessions/s", "within the objective", "kept", title="Trials")
    for column in table.columns[:2]:
        column.justify = "right"
    for trial in found.trials:
        share = f"at most {trial.share:.1%}, given up" if trial.is_given_up else f"{trial.share:.1%}"
        table.add_row(f"{trial.rate:.4g}", share, "yes" if trial.is_kept else "no")
    return table


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
