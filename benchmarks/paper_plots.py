"""Draws the figures of paper.py from its result. Of its files the only one that needs matplotlib."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_DPI = 120
_LABELS = {
    "paged": "Octavo",
    "oracle": "contiguous, oracle",
    "pow2": "contiguous, powers of 2",
    "max": "contiguous, maximum",
    "static": "static batches",
}
_COLOURS = {"paged": "tab:blue", "oracle": "tab:green", "pow2": "tab:olive", "max": "tab:orange", "static": "tab:red"}
_PARTS = {
    "tokens": ("tokens", "tab:blue"),
    "reserved_for_later": ("reserved for later tokens", "tab:olive"),
    "never_used": ("reserved, never used", "tab:orange"),
    "not_reserved": ("not reserved", "lightgrey"),
}
_METHODS = {"recompute": "tab:red", "swap": "tab:green", "cheaper": "tab:blue"}


def plot_all(result: Mapping[str, Any], folder: Path) -> None:
    """Write paper_memory.png, paper_throughput.png, paper_sharing.png and paper_blocks.png."""
    folder.mkdir(parents=True, exist_ok=True)
    data_sets = [each["name"] for each in result["data_sets"]]
    _plot_memory(result["memory"], data_sets, folder / "paper_memory.png")
    _plot_throughput(result["throughput"], data_sets, folder / "paper_throughput.png")
    _plot_sharing(result["sharing"], data_sets, folder / "paper_sharing.png")
    _plot_blocks(result, data_sets, folder / "paper_blocks.png")


def _figure(rows: int, columns: int, title: str) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(5.6 * columns, 4.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=_DPI, bbox_inches="tight")


def _of(values: Iterable[Mapping[str, Any]], **wanted: object) -> list[Mapping[str, Any]]:
    return [value for value in values if all(value[name] == what for name, what in wanted.items())]


def _plot_memory(uses: Sequence[Mapping[str, Any]], data_sets: Sequence[str], path: Path) -> None:
    figure, axes = _figure(
        1, 2 * len(data_sets), "A full KV cache of 15,728 slots: what is in it, and how many requests"
    )
    for place, data_set in enumerate(data_sets):
        here = _of(uses, data_set=data_set)
        names = [_LABELS[use["server"]] for use in here]
        shares, batch = axes[2 * place], axes[2 * place + 1]
        left = [0.0] * len(here)
        for part, (label, colour) in _PARTS.items():
            widths = [100 * use["shares"][part] for use in here]
            shares.barh(names, widths, left=left, color=colour, label=label)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for row, use in enumerate(here):
            shares.text(1, row, f"{100 * use['shares']['tokens']:.1f} %", va="center", color="white")
        shares.set(title=f"{data_set}: KV memory", xlabel="% of all slots", xlim=(0, 100))
        shares.invert_yaxis()
        shares.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
        bars = batch.barh(names, [use["mean_rows"] for use in here], color=[_COLOURS[use["server"]] for use in here])
        batch.bar_label(bars, fmt="%.1f", padding=3)
        batch.set(title=f"{data_set}: requests in the batch", xlabel="mean")
        batch.margins(x=0.15)
        batch.invert_yaxis()
    _save(figure, path)


def _plot_throughput(results: Sequence[Mapping[str, Any]], data_sets: Sequence[str], path: Path) -> None:
    settings = list(dict.fromkeys(result["setting"] for result in results))
    figure, axes = _figure(len(settings), len(data_sets), "Latency against the rate of requests, simulated")
    for row, setting in enumerate(settings):
        for column, data_set in enumerate(data_sets):
            panel = axes[row * len(data_sets) + column]
            here = _of(results, setting=setting, data_set=data_set)
            limit = here[0]["latency_limit"]
            for result in reversed(here):
                rates, latencies = zip(*result["curve"], strict=True)
                server = result["server"]
                panel.plot(rates, latencies, marker=".", color=_COLOURS[server], label=_LABELS[server])
            panel.axhline(limit, color="grey", linestyle=":", label=f"allowed: {limit:.2f} s")
            panel.set(title=f"{data_set}, {setting}", xlabel="requests/s", ylabel="seconds per token", xscale="log")
            panel.set_ylim(0, 4 * limit)
            panel.grid(visible=True, alpha=0.3)
            panel.legend(fontsize="small")
    _save(figure, path)


def _plot_sharing(savings: Sequence[Mapping[str, Any]], data_sets: Sequence[str], path: Path) -> None:
    figure, axes = _figure(1, 2, "KV blocks saved by sharing")
    methods = (("parallel", "answers to a prompt"), ("beam", "beams"))
    for panel, (method, label) in zip(axes, methods, strict=True):
        for place, data_set in enumerate(data_sets):
            here = _of(savings, method=method, data_set=data_set)
            places = [number + (place - 0.5) * 0.38 for number in range(len(here))]
            bars = panel.bar(places, [100 * saving["share"] for saving in here], width=0.36, label=data_set)
            panel.bar_label(bars, fmt="%.1f")
        widths = list(dict.fromkeys(saving["width"] for saving in savings))
        panel.set(xlabel=label, ylabel="% of the blocks that would be needed", xticks=range(len(widths)))
        panel.set_xticklabels([str(width) for width in widths])
        panel.margins(y=0.12)
        panel.legend()
    _save(figure, path)


def _plot_blocks(result: Mapping[str, Any], data_sets: Sequence[str], path: Path) -> None:
    figure, axes = _figure(2, 2, "Sizes of blocks, and how preempted sequences come back")
    waste, latency, restoring, throughput = axes
    for data_set in data_sets:
        here = _of(result["block_sizes"], data_set=data_set)
        sizes = [each["block_size"] for each in here]
        waste.plot(sizes, [100 * each["token_share_of_reserved"] for each in here], marker="o", label=data_set)
        label = f"{data_set}, {here[0]['rate']:.2f} requests/s"
        latency.plot(sizes, [1e3 * each["normalised_latency"] for each in here], marker="o", label=label)
    waste.set(title="Slots in use that hold a token, cache full", ylabel="%")
    latency.set(title="Latency on this machine", ylabel="ms per token")
    latency.set_ylim(bottom=0)
    times = result["restoring"]
    sizes = [each["block_size"] for each in times]
    for name, label in (("recompute", "compute again"), ("swap_out", "to the host"), ("swap_in", "and back")):
        restoring.plot(sizes, [1e3 * each[name] for each in times], marker="o", label=label)
    restoring.set(title=f"A sequence of {times[0]['num_tokens']} tokens, measured", ylabel="ms", yscale="log")
    for setting, style in zip(
        dict.fromkeys(each["setting"] for each in result["preemption"]), ("-", "--"), strict=True
    ):
        for method, colour in _METHODS.items():
            here = _of(result["preemption"], setting=setting, method=method)
            most = max(each["tokens_per_second"] for each in _of(result["preemption"], setting=setting))
            throughput.plot(
                [each["block_size"] for each in here],
                [100 * each["tokens_per_second"] / most for each in here],
                marker="o",
                color=colour,
                linestyle=style,
                label=f"{method}, {setting}",
            )
    throughput.set(title="Throughput of a full cache by way of coming back", ylabel="% of the best")
    for panel in axes:
        panel.set_xscale("log", base=2)
        panel.set_xlabel("tokens in a block")
        panel.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
        panel.grid(visible=True, alpha=0.3)
        panel.legend(fontsize="small")
    _save(figure, path)
