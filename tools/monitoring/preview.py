"""Draws a dashboard with a Prometheus's data as one picture, which says that it is not Grafana."""

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from monitoring.drawing import BACKGROUND, FAINT, TEXT, Drawn, Line, draw
from monitoring.live import Prometheus
from monitoring.queries import targets

COLUMN_IN, ROW_IN, HEAD_IN = 0.62, 0.30, 0.5  # of a cell of Grafana's grid
DPI = 96
NUM_COLOURS = 96  # of the picture's palette: text and lines need no more, and the file is a third

NOTE = "preview, not Grafana"


def picture(board: Mapping[str, Any], prometheus: Prometheus, start: float, end: float, note: str) -> bytes:
    """A PNG of all panels over the seconds from `start` to `end` of Unix time."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    width_in, height_in = 24 * COLUMN_IN, rows * ROW_IN + HEAD_IN
    figure = Figure(figsize=(width_in, height_in), facecolor=BACKGROUND)
    title = f"{board['title']}   [{NOTE}]"
    figure.text(0.008, 1 - 0.2 / height_in, title, color=TEXT, fontsize=12, va="center", fontweight="bold")
    figure.text(0.992, 1 - 0.2 / height_in, note, color=FAINT, fontsize=7.5, va="center", ha="right")
    for panel in board["panels"]:
        place = panel["gridPos"]
        top_in = height_in - HEAD_IN - place["y"] * ROW_IN
        if panel["type"] == "row":
            figure.text(0.008, (top_in - 0.15) / height_in, panel["title"], color=TEXT, fontsize=9.5, va="center")
            continue
        left = (place["x"] * COLUMN_IN + 0.62) / width_in
        bottom = (top_in - place["h"] * ROW_IN + 0.56) / height_in
        size = ((place["w"] * COLUMN_IN - 0.75) / width_in, (place["h"] * ROW_IN - 0.84) / height_in)
        if panel["type"] in {"stat", "table", "text"}:
            left, bottom = left - 0.49 / width_in, bottom - 0.46 / height_in
            size = (size[0] + 0.51 / width_in, size[1] + 0.46 / height_in)
        draw(figure.add_axes((left, bottom, *size)), _drawn(panel, prometheus, start, end))
    return _png(figure)


def _drawn(panel: dict[str, Any], prometheus: Prometheus, start: float, end: float) -> Drawn:
    lines, exemplars = [], []
    step_s = 1.0 if panel["type"] != "heatmap" else max(1.0, (end - start) / 60)
    for target in targets(panel, f"{max(5, round(step_s * 2))}s", f"{end - start:.0f}s"):
        if panel["type"] == "table":
            found = [(labels, [(end, value)]) for labels, value in prometheus.value_of(target.expression, end)]
        else:
            found = prometheus.over_time(target.expression, start, end, step_s)
        for labels, samples in found:
            name = re.sub(r"{{(\w+)}}", lambda match, labels=labels: labels.get(match[1], ""), target.legend).strip()  # type: ignore[misc]
            lines.append(Line(name, [(at - start, value) for at, value in samples], labels))
        if target.exemplar and panel["type"] == "timeseries":
            stored = prometheus.exemplars(target.expression, start, end)
            exemplars += [(each["timestamp"] - start, float(each["value"])) for each in stored]
    return Drawn(panel, lines, exemplars, end - start)


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    raw = io.BytesIO()
    figure.savefig(raw, format="png", dpi=DPI, facecolor=BACKGROUND)
    packed = io.BytesIO()
    Image.open(raw).convert("RGB").quantize(NUM_COLOURS).save(packed, format="png", optimize=True)
    return packed.getvalue()


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
