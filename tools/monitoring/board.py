"""Makes a dashboard's JSON from rows of panels: ids, places, variables, links and annotations."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from monitoring.panels import DATASOURCE, WIDTH, Placed, Query
from monitoring.promql import Queries, foreign

TAG = "roseinfer"
EVERYTHING = ".*"  # what *All* stands for: it also matches series without the label, as those of a server on its own

SHOWN = Queries(
    window="$__rate_interval",
    pods='namespace=~"$namespace",pod=~"$pod"',
    models='model_name=~"$model_name"',
)
RECORDED = '{namespace=~"$namespace",model_name=~"$model_name"}'  # what recorded series can be chosen by
IN_NAMESPACE = 'namespace=~"$namespace"'
IN_POD = 'pod=~"$pod"'


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard before it is JSON: the panels of each row, left to right and line by line, by the row's title.

    `name` is that of its file and, after `roseinfer-`, of its address.
    """

    name: str
    title: str
    description: str
    rows: Mapping[str, Sequence[Placed]]
    variables: Sequence[Builder[models.VariableModel]] = ()


def render(board: Board) -> str:
    """The JSON that Grafana imports."""
    built = (
        dashboard.Dashboard(f"roseinfer / {board.title}")
        .uid(f"roseinfer-{board.name}")
        .description(board.description)
        .tags([TAG])
        .timezone("browser")
        .time("now-30m", "now")
        .refresh("15s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .variables([*_common_variables(), *board.variables])
        .annotations(_annotations())
        .link(
            dashboard.DashboardLink("roseinfer")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
    )
    _place(built, board.rows)
    return json.dumps(built.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _place(built: dashboard.Dashboard, rows: Mapping[str, Sequence[Placed]]) -> None:
    panel_id, top = 1, 0
    for title, panels in rows.items():
        heading = dashboard.Row(title).id(panel_id)
        built.with_row(heading.grid_pos(models.GridPos(x=0, y=top, w=WIDTH, h=1)))
        panel_id, top, left, line_height = panel_id + 1, top + 1, 0, 0
        for placed in panels:
            if left + placed.width > WIDTH:
                left, top, line_height = 0, top + line_height, 0
            position = models.GridPos(x=left, y=top, w=placed.width, h=placed.height)
            built.with_panel(placed.builder.id(panel_id).grid_pos(position))
            panel_id, left, line_height = panel_id + 1, left + placed.width, max(line_height, placed.height)
        top += line_height


def quantiles(name: str, *shares: float, exemplar: float | None = None, **matchers: str) -> list[Query]:
    """A query for each of the shares; that of `exemplar` also shows the kept traces."""
    return [
        Query(SHOWN.quantile(share, name, **matchers), f"p{share * 100:g}", exemplar=share == exemplar)
        for share in shares
    ]


def choices(name: str, label: str, expression: str, description: str) -> dashboard.QueryVariable:
    """A variable with the values that a label has, several at a time, *All* at first."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(DATASOURCE)
        .query({"query": expression, "refId": name})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(EVERYTHING)
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def one_of(name: str, label: str, values: Sequence[str], default: str, description: str) -> dashboard.CustomVariable:
    options = [models.VariableOption(selected=value == default, text=value, value=value) for value in values]
    return (
        dashboard.CustomVariable(name)
        .label(label)
        .description(description)
        .values(",".join(values))
        .options(options)
        .current(models.VariableOption(selected=True, text=default, value=default))
    )


def text_box(name: str, label: str, default: str, description: str) -> dashboard.TextBoxVariable:
    option = models.VariableOption(selected=True, text=default, value=default)
    return (
        dashboard.TextBoxVariable(name)
        .label(label)
        .description(description)
        .default_value(default)
        .current(option)
        .options([option])
    )


def _common_variables() -> list[Builder[models.VariableModel]]:
    running = "roseinfer_num_requests_running"
    return [
        dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"),
        choices("namespace", "Namespace", f"label_values({running}, namespace)", "Kubernetes namespaces"),
        choices("pod", "Pod", f"label_values({running}{{{IN_NAMESPACE}}}, pod)", "Pods of the namespaces"),
        choices(
            "model_name", "Model", f"label_values({running}{{{IN_NAMESPACE},{IN_POD}}}, model_name)", "Served models"
        ),
    ]


def _annotations() -> list[Builder[models.AnnotationQuery]]:
    """Alerts that fire and servers that are not ready, as marks on every panel."""
    alerts = foreign("ALERTS", 'alertname=~"Roseinfer.+"', 'alertstate="firing"')
    starting = f"{SHOWN.sum('lifecycle_state', 'pod, state', state='starting|loading|warmup|draining|failed')} > 0"
    return [
        dashboard.AnnotationQuery()
        .name("Alerts")
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color("red")
        .expr(f"sum by (alertname) ({alerts}) > 0"),
        dashboard.AnnotationQuery()
        .name("Starts and drains")
        .datasource(DATASOURCE)
        .enable(False)
        .icon_color("purple")
        .expr(starting),
    ]
