"""Draws the two curves of kv_cache_cost.py. The only file here that needs matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

if TYPE_CHECKING:
    from benchmarks.kv_cache_cost import Curve

_DPI = 130


def plot(with_cache: "Curve", without_cache: "Curve", subtitle: str, path: Path) -> None:
    """Write a PNG of two panels with log axes: time per token, and time of a whole generation."""
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    per_token, whole = figure.subplots(1, 2)
    for curve, label, colour, marker in (
        (without_cache, "without the cache", "tab:red", "s"),
        (with_cache, "with the cache", "tab:blue", "o"),
    ):
        lengths = [cost.length for cost in curve.costs]
        milliseconds = [cost.median * 1e3 for cost in curve.costs]
        spread = (
            [(cost.median - cost.least) * 1e3 for cost in curve.costs],
            [(cost.most - cost.median) * 1e3 for cost in curve.costs],
        )
        per_token.errorbar(
            lengths,
            milliseconds,
            yerr=spread,
            color=colour,
            marker=marker,
            capsize=3,
            label=f"{label}, grows as length$^{{{curve.token_exponent:.2f}}}$",
        )
        whole.plot(
            lengths,
            curve.total_seconds,
            color=colour,
            marker=marker,
            label=f"{label}, grows as length$^{{{curve.total_exponent:.2f}}}$",
        )
    all_lengths = [cost.length for cost in with_cache.costs]
    _label(per_token, "One more token", "tokens before it", "time per token (ms)", all_lengths)
    _label(whole, "A whole generation (integral of the left)", "tokens generated", "total time (s)", all_lengths)
    figure.suptitle(f"Cost of generation with and without the KV cache\n{subtitle}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, bbox_inches="tight")


def _label(axes: Axes, title: str, x_label: str, y_label: str, lengths: list[int]) -> None:
    axes.set(title=title, xlabel=x_label, ylabel=y_label, xscale="log", yscale="log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45)
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))  # below: nothing inside is free for sure
