"""Builds a panel for Grafana from its queries, unit and description."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, statetimeline, table, text
from grafana_foundation_sdk.builders import timeseries as timeseries_builders
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as formats

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
RED, AMBER, GREEN, BLUE = "red", "orange", "green", "blue"
WIDTH = 24  # columns of a dashboard


@dataclass(frozen=True, slots=True)
class Query:
    """One expression and the name of its series. `exemplar`: show the traces that its buckets name."""

    expression: str
    legend: str = ""
    exemplar: bool = False
    is_instant: bool = False
    format: formats.PromQueryFormat = formats.PromQueryFormat.TIME_SERIES


@dataclass(frozen=True, slots=True)
class Placed:
    """A panel and the columns and rows that it takes."""

    builder: Any  # a builder of a panel; the library has no common type for them that says what they can
    width: int = 8
    height: int = 8


def lines(
    title: str,
    description: str,
    *queries: Query,
    unit: str = "short",
    width: int = 8,
    is_stacked: bool = False,
    are_bars: bool = False,
    limit: float | None = None,
    links: Sequence[tuple[str, str]] = (),
) -> Placed:
    """Series over time. `limit` is drawn as a red line; `links` are (title, address) in the menu of each point."""
    panel = _described(timeseries_builders.Panel(), (title, unit, description), queries)
    panel.line_width(1).fill_opacity(70 if is_stacked else 8).show_points(looks.VisibilityMode.NEVER)
    panel.tooltip(common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI).sort(looks.SortOrder.DESCENDING))
    panel.legend(
        common.VizLegendOptions()
        .display_mode(looks.LegendDisplayMode.LIST)
        .placement(looks.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    panel.min(0) if is_stacked else panel.axis_soft_min(0)
    if is_stacked:
        panel.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL))
    if are_bars:
        panel.draw_style(looks.GraphDrawStyle.BARS)
    if limit is not None:
        panel.thresholds(_thresholds((None, "transparent"), (limit, RED)))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(looks.GraphTresholdsStyleMode.LINE))
    if links:
        panel.data_links([dashboard.DashboardLink(title).url(url).target_blank(True) for title, url in links])
    return Placed(panel, width)


seconds, percentages = partial(lines, unit="s"), partial(lines, unit="percentunit")


def number(
    title: str,
    description: str,
    query: Query,
    *steps: tuple[float | None, str],
    unit: str = "short",
    width: int = 4,
    height: int = 5,
    decimals: int | None = None,
) -> Placed:
    """The newest value, in the colour of the last of `steps`, (from, colour), that it reaches."""
    panel = _described(stat.Panel(), (title, unit, description), [query])
    panel.color_mode(looks.BigValueColorMode.VALUE).graph_mode(looks.BigValueGraphMode.AREA)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"])).no_value("no data")
    panel.thresholds(_thresholds(*(steps or ((None, BLUE),))))
    if decimals is not None:
        panel.decimals(decimals)
    return Placed(panel, width, height)


def heat(
    title: str, unit: str, description: str, query: Query, width: int = 12, links: Sequence[tuple[str, str]] = ()
) -> Placed:
    """How often which value, over time: one column of a histogram's buckets for each interval."""
    query = Query(query.expression, "{{le}}", query.exemplar, format=formats.PromQueryFormat.HEATMAP)
    panel = _described(heatmap.Panel(), (title, unit, description), [query])
    panel.calculate(False).cell_gap(0).show_tooltip().show_legend()
    panel.color(
        heatmap.HeatmapColorOptions()
        .mode(heatmap_models.HeatmapColorMode.SCHEME)
        .scheme("Oranges")
        .scale(heatmap_models.HeatmapColorScale.EXPONENTIAL)
        .exponent(0.5)
        .steps(64)
        .fill("dark-orange")
    )
    panel.y_axis(heatmap.YAxisConfig().unit(unit).axis_placement(looks.AxisPlacement.LEFT))
    if links:
        panel.data_links([dashboard.DashboardLink(title).url(url).target_blank(True) for title, url in links])
    return Placed(panel, width)


def states(
    title: str, unit: str, description: str, *queries: Query, names: dict[float, tuple[str, str]], width: int = 24
) -> Placed:
    """A band for each series whose colour and word say which value it had: value -> (word, colour)."""
    panel = _described(statetimeline.Panel(), (title, unit, description), queries)
    options = {
        f"{value:g}": models.ValueMappingResult(text=text_, color=colour, index=index)
        for index, (value, (text_, colour)) in enumerate(names.items())
    }
    panel.mappings([models.ValueMap(options=options)])
    panel.color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    panel.thresholds(_thresholds((None, "text")))
    panel.row_height(0.8).merge_values(True).show_value(looks.VisibilityMode.AUTO)
    return Placed(panel, width)


def rows(title: str, description: str, query: Query, hidden: Sequence[str] = (), width: int = 12) -> Placed:
    """The newest value of each series as a line of a table, largest first."""
    query = Query(query.expression, query.legend, is_instant=True, format=formats.PromQueryFormat.TABLE)
    panel = _described(table.Panel(), (title, "short", description), [query])
    panel.with_transformation(
        models.DataTransformerConfig(
            id_val="organize", options={"excludeByName": dict.fromkeys(("Time", *hidden), True)}
        )
    )
    panel.sort_by([common.TableSortByFieldState().display_name("Value").desc(True)])
    return Placed(panel, width)


def prose(title: str, content: str, width: int = 12, height: int = 8) -> Placed:
    """Markdown."""
    return Placed(text.Panel().title(title).content(content), width, height)


def _described(panel: Any, words: tuple[str, str, str], queries: Sequence[Query]) -> Any:
    title, unit, description = words
    panel.title(title).description(description).unit(unit).datasource(DATASOURCE)
    for index, query in enumerate(queries):
        panel.with_target(_target(query, "ABCDEFGHIJ"[index]))
    return panel


def _target(query: Query, ref_id: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expression).ref_id(ref_id).datasource(DATASOURCE)
    target.editor_mode(formats.QueryEditorMode.CODE).format(query.format).exemplar(query.exemplar)
    if query.legend:
        target.legend_format(query.legend)
    return target.instant() if query.is_instant else target.range()


def _thresholds(*steps: tuple[float | None, str]) -> dashboard.ThresholdsConfig:
    listed = [models.Threshold(value=value, color=colour) for value, colour in steps]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(listed)
