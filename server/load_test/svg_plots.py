"""Draws plots as SVG text for a page without scripts: axes with round numbers, dots, lines and steps.

Colours come from the page's style sheet, by the number of the series. Knows nothing of what is drawn.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

Point = tuple[float, float]

_WIDTH, _HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 30, 44
_MOST_POINTS = 1500  # of a series: more cannot be told apart, and make the page heavy


@dataclass(frozen=True, slots=True)
class Series:
    """Points that belong together, in order of x for lines and steps."""

    name: str
    points: Sequence[Point]
    kind: Literal["dots", "line", "steps"] = "line"


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps values to places between two pixels."""

    least: float
    most: float
    start: float  # pixel of `least`
    end: float
    is_log: bool

    def place(self, value: float) -> float:
        if self.is_log:
            value = max(value, self.least)
            part = math.log(value / self.least) / math.log(self.most / self.least)
        else:
            part = (value - self.least) / (self.most - self.least)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> list[float]:
        return _log_ticks(self.least, self.most) if self.is_log else _linear_ticks(self.least, self.most)


def plot(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    log_x: bool = False,
    log_y: bool = False,
    limits: Sequence[tuple[str, float]] = (),
) -> str:
    """One plot; `limits` are horizontal lines with a name. Says so where there is nothing to draw."""
    points = [point for each in series for point in each.points]
    if log_x:
        points = [point for point in points if point[0] > 0]
    if log_y:
        points = [point for point in points if point[1] > 0]
    label = escape(title)
    head = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f'<text class="title" x="{_LEFT}" y="18">{label}</text>'
    )
    if not points:
        return f'{head}<text x="{_LEFT}" y="{_HEIGHT / 2}">Nothing to draw.</text></svg>'
    x_axis = _axis([x for x, _ in points], _LEFT, _WIDTH - _RIGHT, is_log=log_x)
    y_axis = _axis([y for _, y in points] + [value for _, value in limits], _HEIGHT - _BOTTOM, _TOP + 14, is_log=log_y)
    parts = [head, *_grid(x_axis, y_axis, x_label, y_label)]
    for name, value in limits:
        y = y_axis.place(value)
        parts.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="small" x="{_WIDTH - _RIGHT}" y="{y - 4:.1f}" text-anchor="end">{escape(name)}</text>'
        )
    for number, each in enumerate(series):
        drawn = [(x, y) for x, y in _thinned(each) if (x > 0 or not log_x) and (y > 0 or not log_y)]
        parts.append(_drawn(number, each.kind, [(x_axis.place(x), y_axis.place(y)) for x, y in drawn]))
    parts.append(_legend(series))
    return "".join([*parts, "</svg>"])


def _axis(values: Sequence[float], start: float, end: float, *, is_log: bool) -> _Axis:
    least, most = min(values), max(values)
    if is_log:
        least, most = 10 ** math.floor(math.log10(least)), 10 ** math.ceil(math.log10(most))
        return _Axis(least, most if most > least else least * 10, start, end, True)
    ticks = _linear_ticks(min(0.0, least), most if most > 0 else 1.0)
    return _Axis(ticks[0], ticks[-1], start, end, False)


def _linear_ticks(least: float, most: float) -> list[float]:
    """Round numbers from at most `least` to at least `most`, about five steps."""
    span = most - least or 1.0
    rough = span / 5
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.floor(least / step + 1e-9), math.ceil(most / step - 1e-9)
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def _log_ticks(least: float, most: float) -> list[float]:
    first, last = round(math.log10(least)), round(math.log10(most))
    every = max(1, math.ceil((last - first) / 6))
    return [10.0**power for power in range(first, last + 1, every)]


def _grid(x_axis: _Axis, y_axis: _Axis, x_label: str, y_label: str) -> list[str]:
    parts = []
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for value in x_axis.ticks():
        x = x_axis.place(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP + 14}" y2="{bottom}"/>')
        parts.append(f'<text class="small" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    for value in y_axis.ticks():
        y = y_axis.place(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="small" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    middle = (_TOP + bottom) / 2
    parts.append(
        f'<text class="small" x="{(_LEFT + right) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
    )
    turned = f'transform="translate(13 {middle}) rotate(-90)"'
    parts.append(f'<text class="small" {turned} text-anchor="middle">{escape(y_label)}</text>')
    return parts


def _thinned(series: Series) -> Sequence[Point]:
    """Every so manyth point, the last one included."""
    every = -(-len(series.points) // _MOST_POINTS)
    return series.points if every <= 1 else [*series.points[::every], series.points[-1]]


def _drawn(number: int, kind: str, places: Sequence[Point]) -> str:
    if not places:
        return ""
    # A line of no length with round ends is a dot: all dots of a series are one element.
    moves: dict[str, Callable[[], str]] = {
        "dots": lambda: "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places),
        "line": lambda: "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places),
        "steps": lambda: (
            f"M{places[0][0]:.1f} {places[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in places[1:])
        ),
    }
    return f'<path class="{kind} s{number}" d="{moves[kind]()}"/>'


def _legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    parts = []
    x = float(_LEFT)
    for number, each in enumerate(series):
        parts.append(f'<path class="key s{number}" d="M{x:.1f} {_TOP + 2}h14"/>')
        parts.append(f'<text class="small" x="{x + 18:.1f}" y="{_TOP + 6}">{escape(each.name)}</text>')
        x += 30 + 7.2 * len(each.name)
    return "".join(parts)
