"""Makes a dashboard's JSON from its file in boards/: ids, places, variables, links and annotations."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from monitoring.objectives import ITL, TTFT
from monitoring.panels import DATASOURCE, SHOWN, WIDTH, Panel, build_panel
from monitoring.promql import bound, foreign

BOARDS = Path(__file__).with_name("boards")
TAG = "roseinfer"
EVERYTHING = ".*"  # what *All* stands for: it also matches series without the label, as those of a server on its own
IN_NAMESPACE = 'namespace=~"$namespace"'


class Board(msgspec.Struct, forbid_unknown_fields=True):
    """A dashboard as its file has it: the panels of each row, left to right and line by line, by the row's title."""

    title: str
    description: str
    rows: dict[str, list[Panel]]


def render(file: Path) -> str:
    """The JSON that Grafana imports. A field that a panel does not have is a ValidationError with its place."""
    board = msgspec.yaml.decode(file.read_text(), type=Board)
    built = (
        dashboard.Dashboard(f"roseinfer / {board.title}")
        .uid(f"roseinfer-{file.stem}")
        .description(board.description)
        .tags([TAG])
        .timezone("browser")
        .time("now-30m", "now")
        .refresh("15s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .variables([*_common_variables(), *_own_variables(file.stem)])
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


def _place(built: dashboard.Dashboard, rows: Mapping[str, Sequence[Panel]]) -> None:
    panel_id, top = 1, 0
    for title, panels in rows.items():
        heading = dashboard.Row(title).id(panel_id)
        built.with_row(heading.grid_pos(models.GridPos(x=0, y=top, w=WIDTH, h=1)))
        panel_id, top, left, line_height = panel_id + 1, top + 1, 0, 0
        for panel in panels:
            width, height = panel.size
            if left + width > WIDTH:
                left, top, line_height = 0, top + line_height, 0
            position = models.GridPos(x=left, y=top, w=width, h=height)
            built.with_panel(build_panel(panel).id(panel_id).grid_pos(position))
            panel_id, left, line_height = panel_id + 1, left + width, max(line_height, height)
        top += line_height


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
        choices("model_name", "Model", f"label_values({running}{{{SHOWN.pods}}}, model_name)", "Served models"),
    ]


def _own_variables(board: str) -> list[Builder[models.VariableModel]]:
    if board == "service":
        waits = [bound(target) for target in (0.08, 0.16, 0.25, 0.5, 1.0, 2.5, 5.0)]
        gaps = [bound(target) for target in (0.01, 0.02, 0.025, 0.03, 0.05, 0.1, 0.25)]
        first = "A first token is good when it is there by then"
        return [
            one_of("ttft", "TTFT target, s", waits, TTFT.threshold, first),
            one_of("itl", "ITL target, s", gaps, ITL.threshold, "A gap between two tokens is good up to this"),
        ]
    if board == "jitter":
        meaning = (
            "Where links to the timeline lead: the operations port of one server, as your browser reaches it, for "
            "instance after `kubectl port-forward pod/… 8001`"
        )
        return [text_box("operations", "Operations port", "http://127.0.0.1:8001", meaning)]
    if board == "rollout":
        deployments = f"label_values(kube_deployment_spec_replicas{{{IN_NAMESPACE}}}, deployment)"
        meaning = (
            "Deployments whose name contains roseinfer, and their autoscalers; edit the variable if yours is called "
            "otherwise"
        )
        return [
            choices("deployment", "Deployment", deployments, meaning).regex("/roseinfer/").all_value(".*roseinfer.*")
        ]
    return []


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
