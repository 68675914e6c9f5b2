"""How the panels of the board look, and where they stand: one look for each kind. Knows no series.

Panels are made with Grafana's own library; what it leaves to Grafana's defaults is left to them here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from types import MappingProxyType
from typing import Protocol, Self, TypeVar

from grafana_foundation_sdk.builders import bargauge, common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATA_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
GRID_WIDTH = 24
STAT_HEIGHT = 4
PLOT_HEIGHT = 8

Queries = Mapping[str, str]  # PromQL by the legend of its lines; {{label}} in a legend is the label's value
ValueTexts = Mapping[str, tuple[str, str]]  # the text and the colour for a value
_NO_TRAFFIC = models.SpecialValueMap(
    models.DashboardSpecialValueMapOptions(
        match=models.SpecialValueMatch.NA_N, result=models.ValueMappingResult(text="no traffic", color="text")
    )
)
_Panel = TypeVar("_Panel", timeseries.Panel, stat.Panel, bargauge.Panel)


class PanelBuilder(Protocol):
    """What the library's builders of all kinds of panels have in common."""

    def id(self, id_val: int) -> Self:
        """Set the number of the panel within its board."""

    def grid_pos(self, grid_pos: models.GridPos) -> Self:
        """Set its place."""

    def build(self) -> models.Panel:
        """The panel."""


@dataclass(frozen=True, slots=True)
class Sized:
    """A panel and the room that it takes, in cells of the grid."""

    panel: PanelBuilder
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Row:
    """A heading with panels beneath it, which stand side by side as long as there is room."""

    title: str
    panels: Sequence[Sized]
    collapsed: bool = False


def lines(
    title: str,
    description: str,
    queries: Queries,
    *,
    unit: str = "short",
    width: int = 8,
    stacked: bool = False,
    top: float | None = None,
) -> Sized:
    """Lines over time; `stacked` where they add up to a whole, `top` where they can rise no higher."""
    panel = (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(30 if stacked else 8)
        .show_points(looks.VisibilityMode.NEVER)
        .min(0)
        .legend(
            common.VizLegendOptions()
            .display_mode(looks.LegendDisplayMode.TABLE)
            .placement(looks.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["mean", "max", "lastNotNull"])
        )
        .tooltip(common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI).sort(looks.SortOrder.DESCENDING))
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL).group("A"))
    if top is not None:
        panel = panel.max(top)
    return Sized(_filled(panel, title, description, queries).unit(unit), width, PLOT_HEIGHT)


def number(
    title: str,
    description: str,
    query: str,
    *,
    unit: str = "short",
    steps: Iterable[tuple[float | None, str]] = ((None, "blue"),),
    texts: ValueTexts = MappingProxyType({}),
    width: int = 3,
) -> Sized:
    """The newest value, large; coloured by the highest of `steps` that it reaches, the first of which has no value."""
    thresholds = [models.Threshold(value, colour) for value, colour in steps]
    panel = (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(looks.BigValueGraphMode.NONE if texts else looks.BigValueGraphMode.AREA)
        .color_mode(looks.BigValueColorMode.VALUE)
        .text_mode(looks.BigValueTextMode.VALUE)
        .thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(thresholds))
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    )
    results = {value: models.ValueMappingResult(text=text, color=colour) for value, (text, colour) in texts.items()}
    panel = panel.mappings([_NO_TRAFFIC, *([models.ValueMap(results)] if results else [])])
    return Sized(_filled(panel, title, description, {"": query}).unit(unit), width, STAT_HEIGHT)


def distribution(title: str, description: str, buckets: str, *, unit: str = "short", width: int = 8) -> Sized:
    """A heat map of a histogram over time: `buckets` asks for its increase by `le`."""
    panel = (
        heatmap.Panel()
        .calculate(False)
        .cell_gap(1)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_models.HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .scale(heatmap_models.HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .steps(64)
        )
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .y_axis(heatmap.YAxisConfig().unit(unit).axis_placement(looks.AxisPlacement.LEFT))
        .show_y_histogram()
    )
    query = _query("A", buckets, "{{le}}").format(PromQueryFormat.HEATMAP)
    panel = panel.title(title).description(description).datasource(DATA_SOURCE).with_target(query)
    return Sized(panel, width, PLOT_HEIGHT)


def bars(title: str, description: str, queries: Queries, *, unit: str = "short", width: int = 8) -> Sized:
    """The newest values beside each other, as bars."""
    panel = (
        bargauge.Panel()
        .orientation(looks.VizOrientation.HORIZONTAL)
        .display_mode(looks.BarGaugeDisplayMode.BASIC)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC))
        .min(0)
    )
    return Sized(_filled(panel, title, description, queries).unit(unit), width, PLOT_HEIGHT)


def facts(title: str, description: str, series: str, hidden: Iterable[str], *, width: int = 24) -> Sized:
    """A table with a line for each server: the labels of a series that is always 1, but for the `hidden` ones."""
    query = _query("A", series, "").format(PromQueryFormat.TABLE).instant()
    organise = models.DataTransformerConfig(
        id_val="organize", options={"excludeByName": dict.fromkeys(hidden, True), "indexByName": {}, "renameByName": {}}
    )
    panel = table.Panel().title(title).description(description).datasource(DATA_SOURCE).with_target(query)
    return Sized(panel.with_transformation(organise), width, STAT_HEIGHT)


def placed(rows: Iterable[Row]) -> list[models.Panel | models.RowPanel]:
    """The panels of all rows with their numbers and places; those of a collapsed row within it."""
    placed_panels: list[models.Panel | models.RowPanel] = []
    next_id, y = 1, 0
    for row in rows:
        heading = dashboard.Row(row.title).id(next_id).collapsed(row.collapsed).datasource(DATA_SOURCE).build()
        heading.grid_pos = models.GridPos(x=0, y=y, w=GRID_WIDTH, h=1)
        panels, y = _placed_below(row.panels, next_id + 1, y + 1)
        next_id += 1 + len(panels)
        heading.panels = panels if row.collapsed else []
        placed_panels += [heading] if row.collapsed else [heading, *panels]
    return placed_panels


def _placed_below(panels: Iterable[Sized], first_id: int, y: int) -> tuple[list[models.Panel], int]:
    """Panels from left to right, and below each other where the grid ends; and where the next row may begin."""
    built, x, lowest = [], 0, y
    for panel_id, sized in enumerate(panels, first_id):
        if x + sized.width > GRID_WIDTH:
            x, y = 0, lowest
        place = models.GridPos(x=x, y=y, w=sized.width, h=sized.height)
        built.append(sized.panel.id(panel_id).grid_pos(place).build())
        x, lowest = x + sized.width, max(lowest, y + sized.height)
    return built, lowest


def _filled(panel: _Panel, title: str, description: str, queries: Queries) -> _Panel:
    panel = panel.title(title).description(description).datasource(DATA_SOURCE)
    for letter, (legend, query) in zip(ascii_uppercase[: len(queries)], queries.items(), strict=True):
        panel = panel.with_target(_query(letter, query, legend))
    return panel


def _query(letter: str, query: str, legend: str) -> prometheus.Dataquery:
    asked = prometheus.Dataquery().ref_id(letter).expr(query).datasource(DATA_SOURCE)
    return asked.legend_format(legend) if legend else asked
