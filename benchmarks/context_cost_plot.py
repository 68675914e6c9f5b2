"""Draws the two curves of context_cost.py, each with the line through it. Needs matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from benchmarks.context_cost import Growth

_DPI = 130


def plot(decode: "Growth", prefill: "Growth", subtitle: str, path: Path) -> None:
    """Write a PNG of two panels with straight axes: a line is a line on them."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw(left, decode, "One decoded token", "time (ms)", 1e3)
    _draw(right, prefill, "One token of a prompt, in chunks", "time (µs)", 1e6)
    figure.suptitle(f"Cost of a token against its context\n{subtitle}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, bbox_inches="tight")


def _draw(axes: Axes, growth: "Growth", title: str, y_label: str, scale: float) -> None:
    line, last = growth.line, growth.contexts[-1]
    label = f"{line.at_zero * scale:,.1f} + {line.per_token * scale * 1000:,.1f} per 1,000 tokens"
    ends = [line.at_zero * scale, (line.at_zero + line.per_token * last) * scale]
    axes.plot([0, last], ends, color="tab:gray", linestyle="--", label=label)
    axes.plot(growth.contexts, [s * scale for s in growth.seconds], color="tab:blue", marker="o", label="measured")
    axes.set(title=title, xlabel="tokens before it", ylabel=y_label, xlim=(0, None), ylim=(0, None))
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="upper left")
