"""Makes a dashboard's JSON from its file in boards/: ids, places, variables, links and annotations."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from monitoring.panels import DATASOURCE, SHOWN, WIDTH, Panel, build_panel

BOARDS = Path(__file__).with_name("boards")
VARIABLES = Path(__file__).with_name("variables.yaml")
TAG = "roseinfer"


class Variable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a reader chooses: some of the values that a query finds, one of those that are given, or any text."""

    name: str
    label: str
    description: str
    query: str = ""
    regex: str = ""  # of the values that the query finds
    everything: str = ".*"  # what *All* stands for: it also matches series without the label, as of a server on its own
    values: list[str] = []
    default: str = ""


class Board(msgspec.Struct, forbid_unknown_fields=True):
    """A dashboard as its file has it: the panels of each row, left to right and line by line, by the row's title."""

    title: str
    description: str
    rows: dict[str, list[Panel]]
    variables: list[Variable] = []  # beside those that all boards have


def render(file: Path) -> str:
    """The JSON that Grafana imports. A field that a panel does not have is a ValidationError with its place."""
    board = msgspec.yaml.decode(file.read_text(), type=Board)
    variables = msgspec.yaml.decode(VARIABLES.read_text(), type=list[Variable])
    source = dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    built = (
        dashboard.Dashboard(f"roseinfer / {board.title}")
        .uid(f"roseinfer-{file.stem}")
        .description(board.description)
        .tags([TAG])
        .timezone("browser")
        .time("now-30m", "now")
        .refresh("15s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .variables([source, *map(_variable, (*variables, *board.variables))])
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


def _variable(variable: Variable) -> Builder[models.VariableModel]:
    if variable.query:
        found = (
            dashboard.QueryVariable(variable.name)
            .label(variable.label)
            .description(variable.description)
            .datasource(DATASOURCE)
            .query({"query": variable.query, "refId": variable.name})
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(variable.everything)
            .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
        )
        return found.regex(variable.regex) if variable.regex else found
    of = [
        models.VariableOption(selected=value == variable.default, text=value, value=value)
        for value in variable.values or [variable.default]
    ]
    chosen = models.VariableOption(selected=True, text=variable.default, value=variable.default)
    built: dashboard.CustomVariable | dashboard.TextBoxVariable
    if variable.values:
        built = dashboard.CustomVariable(variable.name).values(",".join(variable.values)).options(of)
    else:
        built = dashboard.TextBoxVariable(variable.name).default_value(variable.default).options(of)
    return built.label(variable.label).description(variable.description).current(chosen)


def _annotations() -> list[Builder[models.AnnotationQuery]]:
    """Alerts that fire and servers that are not ready, as marks on every panel."""
    of_these = 'namespace=~"$namespace|",pod=~"$pod|"'  # or of all servers together
    alerts = f'sum by (alertname) (ALERTS{{alertname=~"Roseinfer.+",alertstate="firing",{of_these}}}) > 0'
    starting = 'roseinfer_lifecycle_state{state=~"starting|loading|warmup|draining|failed"}'
    return [
        dashboard.AnnotationQuery().name("Alerts").datasource(DATASOURCE).enable(True).icon_color("red").expr(alerts),
        dashboard.AnnotationQuery()
        .name("Starts and drains")
        .datasource(DATASOURCE)
        .enable(False)
        .icon_color("purple")
        .expr(SHOWN.complete(f"sum by (pod, state) ({starting}) > 0")),
    ]
