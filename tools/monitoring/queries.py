"""Reads the committed dashboards: their panels and queries, with Grafana's variables filled in."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from monitoring.outputs import FOLDER, ROOT

# What each variable stands for when everything is chosen; a test holds this against the dashboards.
CHOSEN = {
    "namespace": ".*",
    "pod": ".*",
    "model_name": ".*",
    "deployment": ".*roseinfer.*",
    "ttft": "0.5",
    "itl": "0.05",
}


@dataclass(frozen=True, slots=True)
class Target:
    """One query of a panel, as Grafana would send it."""

    panel: str
    expression: str
    legend: str
    exemplar: bool


def dashboards() -> dict[str, dict[str, Any]]:
    """Name of the file -> its content, as committed."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / FOLDER).glob("*.json"))}


def panels(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Without the rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def targets(panel: Mapping[str, Any], window: str, span: str) -> Iterator[Target]:
    """`window` stands for $__rate_interval, `span` for the range that is shown."""
    for target in panel.get("targets", ()):
        expression = filled(target["expr"], window, span)
        yield Target(panel["title"], expression, target.get("legendFormat", ""), bool(target["exemplar"]))


def filled(expression: str, window: str, span: str) -> str:
    for name, value in {"__rate_interval": window, "__range": span, **CHOSEN}.items():
        expression = expression.replace(f"${name}", value)
    assert "$" not in expression, expression
    return expression
