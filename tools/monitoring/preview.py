"""Draws a dashboard with a Prometheus's data as one picture, roughly as Grafana would, which says that it is not."""

import io
import itertools
import math
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator
from PIL import Image

from monitoring.live import Prometheus
from monitoring.queries import targets

FloatArray = npt.NDArray[np.float64]

COLUMN_IN, ROW_IN, HEAD_IN = 0.62, 0.30, 0.5  # of a cell of Grafana's grid
DPI = 96
NUM_COLOURS = 96  # of the picture's palette: text and lines need no more, and the file is a third
MOST_NAMED = 12  # series in a legend
MOST_ROWS = 9  # of a table

NOTE = "preview, not Grafana"

STYLE = Path(__file__).with_name("preview.mplstyle")
BACKGROUND, TEXT, FAINT = "#111217", "#ccccdc", "#8e8e9b"
NAMED = {
    "green": "#73bf69",
    "orange": "#ff9830",
    "red": "#f2495c",
    "blue": "#5794f2",
    "purple": "#b877d9",
    "text": TEXT,
}
UNITS = {
    "s": "s",
    "reqps": "/s",
    "ops": "/s",
    "joule": "J",
    "watt": "W",
    "celsius": "°C",
    "hertz": "Hz",
    "Bps": "B/s",
    "bytes": "B",
    "mbytes": "B",
}


class Drawn(NamedTuple):
    """A panel of the dashboard's JSON, and its series: at these seconds since the beginning, NaN where one has none."""

    panel: dict[str, Any]
    at: FloatArray
    names: list[str]
    labels: list[dict[str, str]]
    values: FloatArray  # [series, moments]
    exemplars: list[tuple[float, float]]

    @property
    def defaults(self) -> dict[str, Any]:
        defaults: dict[str, Any] = self.panel["fieldConfig"]["defaults"]
        return defaults

    def look(self, name: str) -> dict[str, Any]:
        """The colour and the stroke that the panel gives to the series of that name, if it does."""
        for override in self.panel["fieldConfig"].get("overrides", ()):
            if override["matcher"]["options"] == name:
                own = {each["id"]: each["value"] for each in override["properties"]}
                code = own["color"]["fixedColor"]
                return {"color": NAMED.get(code, code)} | ({"linestyle": "--"} if "custom.lineStyle" in own else {})
        return {}

    def with_unit(self, value: float) -> str:
        """Grafana's words for a value of this panel: `12.5 ms` for 0.0125 of the unit `s`."""
        unit = self.defaults.get("unit", "short")
        if unit == "percentunit":
            return f"{value * 100:.4g} %"
        value = float(f"{value * 2**20 if unit == 'mbytes' else value:.3g}")
        if math.isfinite(value) and (unit == "s" or abs(value) >= 1000):
            return EngFormatter(UNITS.get(unit, ""))(value).strip()
        return f"{value:g} {UNITS.get(unit, '')}".strip()


def picture(board: Mapping[str, Any], prometheus: Prometheus, start: float, end: float, note: str) -> bytes:
    """A PNG of all panels over the seconds from `start` to `end` of Unix time."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    width_in, height_in = 24 * COLUMN_IN, rows * ROW_IN + HEAD_IN
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(width_in, height_in))
        head = 1 - 0.2 / height_in
        figure.text(0.008, head, f"{board['title']}   [{NOTE}]", fontsize=12, va="center", fontweight="bold")
        figure.text(0.992, head, note, color=FAINT, fontsize=7.5, va="center", ha="right")
        for panel in board["panels"]:
            place = panel["gridPos"]
            left_in, top_in = place["x"] * COLUMN_IN, height_in - HEAD_IN - place["y"] * ROW_IN
            if panel["type"] == "row":
                figure.text(0.008, (top_in - 0.15) / height_in, panel["title"], fontsize=9.5, va="center")
                continue
            panel_in = (place["w"] * COLUMN_IN, place["h"] * ROW_IN)
            has_axes = panel["type"] not in {"stat", "table", "text"}
            margin_in, foot_in = (0.62, 0.56) if has_axes else (0.13, 0.1)
            size_in = (panel_in[0] - margin_in - 0.13, panel_in[1] - foot_in - 0.28)
            box = (left_in + margin_in, top_in - panel_in[1] + foot_in, *size_in)
            axes = figure.add_axes((box[0] / width_in, box[1] / height_in, box[2] / width_in, box[3] / height_in))
            axes.set_title(panel["title"])
            if not has_axes:
                axes.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1))
            _KINDS[panel["type"]](axes, _drawn(panel, prometheus, start, end))
        return _png(figure)


def _drawn(panel: dict[str, Any], prometheus: Prometheus, start: float, end: float) -> Drawn:
    step_s = 1.0 if panel["type"] != "heatmap" else max(1.0, (end - start) / 60)
    at = np.arange(0.0, end - start + step_s / 2, step_s)
    names, labels, rows, exemplars = [], [], [], []
    for target in targets(panel, f"{max(5, round(step_s * 2))}s", f"{end - start:.0f}s"):
        if panel["type"] == "table":
            found = [(own, [(start, value)]) for own, value in prometheus.value_of(target.expression, end)]
        else:
            found = prometheus.over_time(target.expression, start, end, step_s)
        for own, samples in found:
            name = target.legend
            for label, value in own.items():
                name = name.replace(f"{{{{{label}}}}}", value)
            names.append(re.sub(r"{{\w+}}", "", name).strip())
            labels.append(own)
            rows.append(np.full(len(at), np.nan))
            for moment, number in samples:
                rows[-1][round((moment - start) / step_s)] = number
        if target.exemplar and panel["type"] == "timeseries":
            stored = prometheus.exemplars(target.expression, start, end)
            exemplars += [(each["timestamp"] - start, float(each["value"])) for each in stored]
    return Drawn(panel, at, names, labels, np.array(rows).reshape(-1, len(at)), exemplars)


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    raw, packed = io.BytesIO(), io.BytesIO()
    figure.savefig(raw, format="png", dpi=DPI)
    Image.open(raw).convert("RGB").quantize(NUM_COLOURS).save(packed, format="png", optimize=True)
    return packed.getvalue()


def _over_time(axes: Axes, drawn: Drawn) -> None:
    axes.set_xlim(0, drawn.at[-1])
    axes.xaxis.set_major_formatter("{x:g} s")
    axes.xaxis.set_major_locator(MaxNLocator(5))


def _lines(axes: Axes, drawn: Drawn) -> None:
    custom = drawn.defaults.get("custom", {})
    if custom.get("stacking", {}).get("mode") == "normal":
        _stacked(axes, drawn, are_bars=custom.get("drawStyle") == "bars")
    else:
        for name, values in zip(drawn.names, drawn.values, strict=True):
            axes.plot(drawn.at, values, label=name, **drawn.look(name))
        top = np.nanmax([0.0, *drawn.values.flat, *(value for _, value in drawn.exemplars)])
        axes.set_ylim(np.nanmin([0.0, *drawn.values.flat]), top * 1.1 or 1.0)
    for at, value in drawn.exemplars:
        axes.scatter(at, value, marker="D", s=7, color="#8ab8ff", zorder=5)
    if custom.get("thresholdsStyle", {}).get("mode") == "line":
        for step in drawn.defaults["thresholds"]["steps"]:
            if step["value"] is not None and step["value"] <= axes.get_ylim()[1] * 1.5:
                axes.axhline(step["value"], color=NAMED[step["color"]], linewidth=0.9, linestyle="--")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: drawn.with_unit(value)))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    _over_time(axes, drawn)
    handles, names = axes.get_legend_handles_labels()
    if any(names):
        shown = handles[:MOST_NAMED], names[:MOST_NAMED]
        axes.legend(*shown, loc="upper left", bbox_to_anchor=(-0.02, -0.12), ncols=4)


def _stacked(axes: Axes, drawn: Drawn, *, are_bars: bool) -> None:
    """Of series with something in them: nineteen causes have a name, and a handful a height."""
    heights = np.nan_to_num(drawn.values)
    tall = [int(row) for row in np.argsort(-heights.sum(axis=1), kind="stable") if heights[row].sum() > 0]
    if not tall:
        axes.set_ylim(0, 1)
    elif are_bars:
        bottom = np.zeros(len(drawn.at))
        for row in tall:
            name = drawn.names[row]
            axes.bar(drawn.at, heights[row], width=drawn.at[1], bottom=bottom, label=name, **drawn.look(name))
            bottom += heights[row]
    else:
        names = [drawn.names[row] for row in tall]
        looks = [drawn.look(name) for name in names]
        colours = [look["color"] for look in looks] if all(looks) else None
        axes.stackplot(drawn.at, heights[tall], labels=names, colors=colours, alpha=0.8)


def _number(axes: Axes, drawn: Drawn) -> None:
    values = drawn.values[0][np.isfinite(drawn.values[0])] if len(drawn.values) else np.empty(0)
    if not len(values):
        axes.text(0.5, 0.6, "no data", fontsize=17, ha="center", va="center")
        return
    steps = drawn.defaults["thresholds"]["steps"]
    colour = [NAMED[step["color"]] for step in steps if step["value"] is None or values[-1] >= step["value"]][-1]
    height = 0.3 * (values - values.min()) / (np.ptp(values) or 1.0)
    axes.fill_between(np.linspace(0, 1, len(values)), height, color=colour, alpha=0.25, linewidth=0)
    axes.text(0.5, 0.6, drawn.with_unit(float(values[-1])), color=colour, fontsize=17, ha="center", va="center")


def _heat(axes: Axes, drawn: Drawn) -> None:
    """Buckets are cumulative; a row is what lies between two bounds. Empty rows at both ends are left out."""
    bounds = [float(labels["le"]) for labels in drawn.labels]
    order = np.argsort(bounds)
    table = np.diff(np.nan_to_num(drawn.values[order]), axis=0, prepend=0.0)
    used = np.flatnonzero(table.sum(axis=1) > 0)
    if len(used):
        rows = range(used[0], used[-1] + 1)
        shades = np.sqrt(np.clip(table[rows], 0, None))
        axes.pcolormesh(drawn.at, np.arange(len(rows)) + 0.5, shades, cmap="inferno", shading="nearest")
        ticks = range(0, len(rows), max(1, len(rows) // 8))
        axes.set_yticks([row + 1.0 for row in ticks], [drawn.with_unit(bounds[order[rows[row]]]) for row in ticks])
    _over_time(axes, drawn)


def _states(axes: Axes, drawn: Drawn) -> None:
    (mapping,) = drawn.defaults["mappings"]
    for row, (name, values) in enumerate(zip(drawn.names, drawn.values, strict=True)):
        axes.text(drawn.at[-1] * 0.005, row + 0.42, name)
        known = zip(drawn.at[np.isfinite(values)], values[np.isfinite(values)], strict=True)
        for value, run in itertools.groupby(known, key=lambda point: point[1]):
            times = [at for at, _ in run]
            state, length = mapping["options"][f"{value:g}"], times[-1] - times[0] + drawn.at[1]
            bar = axes.barh(row, length, left=times[0], height=0.7, color=NAMED[state["color"]])
            if length > drawn.at[-1] * 0.05:
                axes.bar_label(bar, [state["text"]], label_type="center", color=BACKGROUND)
    axes.set(yticks=[], ylim=(-0.6, max(len(drawn.names), 1) - 0.2))
    _over_time(axes, drawn)


def _table(axes: Axes, drawn: Drawn) -> None:
    hidden = {"__name__", *drawn.panel["transformations"][0]["options"]["excludeByName"]}
    order = np.argsort(-drawn.values[:, 0], kind="stable")[:MOST_ROWS]
    names = [name for name in (drawn.labels[0] if drawn.labels else ()) if name not in hidden]
    cells = [[drawn.labels[row].get(name, "") for name in names] for row in order]
    if "Value" not in hidden:
        names.append("value")
        cells = [[*texts, drawn.with_unit(drawn.values[row, 0])] for row, texts in zip(order, cells, strict=True)]
    if cells:
        table = axes.table(cells, colLabels=names, loc="upper left", cellLoc="left", edges="open")
        table.auto_set_column_width(range(len(names)))
        for cell in table.get_celld().values():
            cell.get_text().set_color(TEXT)


def _prose(axes: Axes, drawn: Drawn) -> None:
    """The Markdown without its links and marks, as far as there is room."""
    joined = re.sub(r"\n {3}", " ", drawn.panel["options"]["content"])
    plain = re.sub(r"\[([^\]]+)\]\([^)]+\)|\*\*|`|^\|-.*\n", r"\1", joined, flags=re.MULTILINE)
    width, room = int(drawn.panel["gridPos"]["w"] * 8.5), int(drawn.panel["gridPos"]["h"] * 2.6)
    lines = [
        part for line in plain.splitlines() for part in textwrap.wrap(line, width, subsequent_indent="   ") or [""]
    ]
    kept = lines if len(lines) <= room else [*lines[: room - 1], "…"]
    axes.text(0.015, 0.98, "\n".join(kept), fontsize=6, va="top", family="monospace", linespacing=1.15)


_KINDS = {
    "timeseries": _lines,
    "stat": _number,
    "heatmap": _heat,
    "state-timeline": _states,
    "table": _table,
    "text": _prose,
}
