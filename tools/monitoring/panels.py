"""Builds a panel for Grafana from its entry in a file of boards/: one function for each kind of panel.

The PromQL there names series without the labels that the dashboard's variables choose by; SHOWN adds those.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec
from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, statetimeline, table, text
from grafana_foundation_sdk.builders import timeseries as timeseries_builders
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as formats

from monitoring.objectives import OBJECTIVES
from monitoring.promql import Selection
from roseinfer.observe.gaps.causes import CAUSES, Cause, Place

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH = 24  # columns of a dashboard
TIMELINE_LINKS = {
    "Timeline of the server": "${operations}/debug/timeline",
    "Requests in flight": "${operations}/debug/requests",
}

OBJECTIVE = "objective"  # the name of a series that is what another should stay below
_LINE_AT_THE_OBJECTIVE = [
    models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": "red"}),
    models.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [6, 6]}),
    models.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
]

SHOWN = Selection(
    pods='namespace=~"$namespace",pod=~"$pod"',
    models='model_name=~"$model_name"',
    recorded='namespace=~"$namespace",model_name=~"$model_name"',
    # The labels that the exporter of GPUs gives with honorLabels and without.
    gpus=(
        'namespace=~"$namespace",pod=~"$pod"',
        'exported_namespace=~"$namespace",exported_pod=~"$pod"',
    ),
)

FAST_BURN = 14.4  # times the allowed pace: a budget of 30 days is gone in two
Number = int | float  # a number stays as its file writes it
Step = tuple[Number | None, str]


class Panel(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A panel as its file has it. `queries` are PromQL by the name of the series, `query` one without a name."""

    title: str
    kind: Literal["lines", "number", "heat", "states", "rows", "prose"] = "lines"
    description: str = ""
    unit: str = "short"
    width: int | None = None  # in columns; that of its kind if there is none
    height: int | None = None
    query: str = ""
    queries: dict[str, str] = {}
    causes: Place | None = None  # repeats the query for each cause of that place, as @CAUSE@
    exemplar: str | None = None  # the name of the series that also shows the traces that its buckets name
    is_stacked: bool = False
    are_bars: bool = False
    has_links: bool = False  # to the timeline, in the menu of each point
    limit: Number | None = None  # a red line
    steps: list[Step] = []  # (from, colour) of a number; blue if there are none
    objective: str = ""  # the key of the objective whose share and budget colour a number
    decimals: int | None = None
    names: dict[int, tuple[str, str]] = {}  # word and colour of each value of a state
    hidden: list[str] = []  # labels that a table does not show
    content: str = ""  # Markdown; @CAUSES@ is the table of causes

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        width, height = _SIZES[self.kind]
        return self.width or width, self.height or height

    def targets(self) -> dict[str, str]:
        """Complete PromQL by the name of the series."""
        found = self.queries or {"": self.query}
        if self.causes:
            causes = [cause for cause in CAUSES if cause.row.place == self.causes]
            found = {cause: self.query.replace("@CAUSE@", cause) for cause in causes}
        return {legend: SHOWN.complete(query) for legend, query in found.items()}


def build_panel(panel: Panel) -> Any:
    """The builder of the panel; the library has no common type for builders that says what they can."""
    if panel.kind == "prose":
        rows = "\n".join(f"| `{cause}` | {cause.row.remedy} |" for cause in CAUSES)
        causes = f"| cause | what changes it |\n|---|---|\n{rows}"
        return text.Panel().title(panel.title).content(panel.content.replace("@CAUSES@", causes))
    built = _KINDS[panel.kind](panel)
    built.title(panel.title).description(panel.description).unit(panel.unit).datasource(DATASOURCE)
    if panel.has_links:
        links = [dashboard.DashboardLink(title).url(url).target_blank(True) for title, url in TIMELINE_LINKS.items()]
        built.data_links(links)
    for cause in _causes_in(panel):
        color = {"mode": models.FieldColorModeId.FIXED.value, "fixedColor": cause.row.color}
        built.override_by_name(cause, [models.DynamicConfigValue(id_val="color", value=color)])
    if OBJECTIVE in panel.queries:
        built.override_by_name(OBJECTIVE, _LINE_AT_THE_OBJECTIVE)
    for index, (legend, expression) in enumerate(panel.targets().items()):
        target = prometheus.Dataquery().expr(expression).ref_id("ABCDEFGHIJ"[index]).datasource(DATASOURCE)
        target.editor_mode(formats.QueryEditorMode.CODE).exemplar(legend == panel.exemplar)
        target.format(_FORMATS.get(panel.kind, formats.PromQueryFormat.TIME_SERIES))
        if legend or panel.kind == "heat":
            target.legend_format(legend or "{{le}}")
        built.with_target(target.instant() if panel.kind == "rows" else target.range())
    return built


def _causes_in(panel: Panel) -> list[Cause]:
    """The causes that are series of a panel: those of its place, or all where the label is the series' name."""
    return [cause for cause in CAUSES if cause.row.place == panel.causes or "{{cause}}" in panel.queries]


def _lines(panel: Panel) -> timeseries_builders.Panel:
    """Series over time."""
    built = timeseries_builders.Panel()
    built.line_width(1).fill_opacity(70 if panel.is_stacked else 8).show_points(looks.VisibilityMode.NEVER)
    built.tooltip(common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI).sort(looks.SortOrder.DESCENDING))
    legend = common.VizLegendOptions().display_mode(looks.LegendDisplayMode.LIST)
    built.legend(legend.placement(looks.LegendPlacement.BOTTOM).show_legend(True))
    if panel.is_stacked:
        built.min(0).stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL))
    else:
        built.axis_soft_min(0)
    if panel.are_bars:
        built.draw_style(looks.GraphDrawStyle.BARS)
    if panel.limit is not None:
        built.thresholds(_thresholds((None, "transparent"), (panel.limit, "red")))
        built.thresholds_style(common.GraphThresholdsStyleConfig().mode(looks.GraphTresholdsStyleMode.LINE))
    return built


def _number(panel: Panel) -> stat.Panel:
    """The newest value, in the colour of the last step that it reaches."""
    built = stat.Panel()
    built.color_mode(looks.BigValueColorMode.VALUE).graph_mode(looks.BigValueGraphMode.AREA)
    built.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"])).no_value("no data")
    steps = panel.steps
    for objective in OBJECTIVES:
        if objective.key == panel.objective:  # red is a budget of 30 days gone in two
            wanted = float(objective.wanted)
            steps = [(None, "red"), (1 - FAST_BURN * (1 - wanted), "orange"), (wanted, "green")]
    built.thresholds(_thresholds(*(steps or [(None, "blue")])))
    if panel.decimals is not None:
        built.decimals(panel.decimals)
    return built


def _heat(panel: Panel) -> heatmap.Panel:
    """How often which value, over time: one column of a histogram's buckets for each interval."""
    built = heatmap.Panel().calculate(False).cell_gap(0).show_tooltip().show_legend()
    built.color(
        heatmap.HeatmapColorOptions()
        .mode(heatmap_models.HeatmapColorMode.SCHEME)
        .scheme("Oranges")
        .scale(heatmap_models.HeatmapColorScale.EXPONENTIAL)
        .exponent(0.5)
        .steps(64)
        .fill("dark-orange")
    )
    return built.y_axis(heatmap.YAxisConfig().unit(panel.unit).axis_placement(looks.AxisPlacement.LEFT))


def _states(panel: Panel) -> statetimeline.Panel:
    """A band for each series, whose colour and word say which value it had."""
    options = {
        str(value): models.ValueMappingResult(text=word, color=colour, index=index)
        for index, (value, (word, colour)) in enumerate(panel.names.items())
    }
    built = statetimeline.Panel().mappings([models.ValueMap(options=options)])
    built.color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    built.thresholds(_thresholds((None, "text")))
    return built.row_height(0.8).merge_values(True).show_value(looks.VisibilityMode.AUTO)


def _rows(panel: Panel) -> table.Panel:
    """The newest value of each series as a line of a table, largest first."""
    hidden = {"excludeByName": dict.fromkeys(("Time", *panel.hidden), True)}
    built = table.Panel().with_transformation(models.DataTransformerConfig(id_val="organize", options=hidden))
    return built.sort_by([common.TableSortByFieldState().display_name("Value").desc(True)])


def _thresholds(*steps: Step) -> dashboard.ThresholdsConfig:
    listed = [models.Threshold(value=value, color=colour) for value, colour in steps]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(listed)


_KINDS: dict[str, Callable[[Panel], Any]] = {
    "lines": _lines,
    "number": _number,
    "heat": _heat,
    "states": _states,
    "rows": _rows,
}
_SIZES = {
    "lines": (8, 8),
    "number": (4, 5),
    "heat": (12, 8),
    "states": (24, 8),
    "rows": (12, 8),
    "prose": (12, 8),
}
_FORMATS = {"heat": formats.PromQueryFormat.HEATMAP, "rows": formats.PromQueryFormat.TABLE}
