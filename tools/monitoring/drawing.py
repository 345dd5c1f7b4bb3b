"""Draws a panel's series with matplotlib, roughly as Grafana would."""

import itertools
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import FuncFormatter, MaxNLocator

BACKGROUND, PANEL, TEXT, FAINT, GRID = "#111217", "#181b1f", "#ccccdc", "#8e8e9b", "#2c3037"
SERIES = (
    *("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#6ed0e0"),
    *("#cca300", "#447ebc", "#c15c17", "#96d98d", "#e0b4f4", "#fade2a", "#37872d", "#a352cc"),
)
NAMED = {
    "green": "#73bf69",
    "orange": "#ff9830",
    "red": "#f2495c",
    "blue": "#5794f2",
    "purple": "#b877d9",
    "text": TEXT,
}
HEAT = LinearSegmentedColormap.from_list("heat", [PANEL, "#7a3b0c", "#ff780a", "#ffe0b3"])
SMALL = 6.5

_FACTORS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_SUFFIXES = {
    "reqps": " /s",
    "ops": " /s",
    "joule": " J",
    "watt": " W",
    "celsius": " °C",
    "hertz": "Hz",
    "Bps": "B/s",
    "bytes": "B",
    "decmbytes": "B",
}

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Line:
    """A series and its name; `at` in seconds since the beginning."""

    name: str
    points: Points
    labels: dict[str, str]

    @property
    def at(self) -> list[float]:
        return [at for at, _ in self.points]

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points]

    @property
    def last(self) -> float:
        return next((value for value in reversed(self.values) if not math.isnan(value)), math.nan)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A panel of the dashboard's JSON, its lines, its exemplars as (when, value), and the seconds that are shown."""

    panel: dict[str, Any]
    lines: list[Line]
    exemplars: Points
    span_s: float

    @property
    def unit(self) -> str:
        unit: str = self.panel["fieldConfig"]["defaults"].get("unit", "short")
        return unit

    @property
    def custom(self) -> dict[str, Any]:
        custom: dict[str, Any] = self.panel["fieldConfig"]["defaults"].get("custom", {})
        return custom


def draw(axes: Axes, drawn: Drawn) -> None:
    axes.set_facecolor(PANEL)
    axes.set_title(drawn.panel["title"], loc="left", color=TEXT, fontsize=8, pad=4)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=FAINT, labelsize=SMALL, length=0)
    _KINDS[drawn.panel["type"]](axes, drawn)


def _over_time(axes: Axes, drawn: Drawn) -> None:
    axes.set_xlim(0, drawn.span_s)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
    axes.xaxis.set_major_locator(MaxNLocator(5))


def _lines(axes: Axes, drawn: Drawn) -> None:
    is_stacked = drawn.custom.get("stacking", {}).get("mode") == "normal"
    if is_stacked:
        _stacked(axes, drawn)
    else:
        for line, colour in zip(drawn.lines, SERIES * 2, strict=False):
            axes.plot(line.at, line.values, color=colour, linewidth=1.1, label=line.name)
            axes.fill_between(line.at, line.values, color=colour, alpha=0.06, linewidth=0)
    if drawn.exemplars:
        at, values = zip(*drawn.exemplars, strict=True)
        axes.scatter(at, values, marker="D", s=7, color="#8ab8ff", edgecolors=BACKGROUND, linewidths=0.3, zorder=5)
    _bounds(axes, drawn, is_stacked)
    axes.grid(color=GRID, linewidth=0.5)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: with_unit(value, drawn.unit)))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    _over_time(axes, drawn)
    names = [line for line in drawn.lines if line.name][:12]
    if names:
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(-0.02, -0.12),
            ncols=4,
            fontsize=SMALL - 0.7,
            frameon=False,
            labelcolor=TEXT,
            handlelength=1.0,
            columnspacing=1.0,
            borderpad=0,
            labelspacing=0.2,
        )


def _stacked(axes: Axes, drawn: Drawn) -> None:
    """Of series with something in them: nineteen causes have a name, and a handful a height."""
    tall = sorted(
        (line for line in drawn.lines if np.nansum(line.values) > 0), key=lambda line: -np.nansum(line.values)
    )
    if not tall:
        return
    grid = sorted({at for line in tall for at in line.at})
    heights = [_on(grid, line) for line in tall]
    colours = list(SERIES[: len(tall)]) + ["#555555"] * max(0, len(tall) - len(SERIES))
    if drawn.custom.get("drawStyle") == "bars":
        bottom = np.zeros(len(grid))
        for line, height, colour in zip(tall, heights, colours, strict=True):
            axes.bar(grid, height, width=_step(grid), bottom=bottom, color=colour, label=line.name, linewidth=0)
            bottom += height
    else:
        axes.stackplot(grid, *heights, colors=colours, labels=[line.name for line in tall], alpha=0.8, linewidth=0)


def _on(grid: Sequence[float], line: Line) -> np.ndarray[Any, np.dtype[np.float64]]:
    known = dict(line.points)
    heights: np.ndarray[Any, np.dtype[np.float64]] = np.nan_to_num(np.array([known.get(at, 0.0) for at in grid]))
    return heights


def _step(grid: Sequence[float]) -> float:
    return min((later - earlier for earlier, later in itertools.pairwise(grid)), default=1.0)


def _bounds(axes: Axes, drawn: Drawn, is_stacked: bool) -> None:
    values = [value for line in drawn.lines for value in line.values if math.isfinite(value)]
    if not is_stacked and values:
        top = max([*values, *(value for _, value in drawn.exemplars)])
        axes.set_ylim(min(0.0, *values, 0.0), top * 1.1 or 1.0)
    elif not values or max(values) <= 0:
        axes.set_ylim(0, 1)
    if drawn.custom.get("thresholdsStyle", {}).get("mode") == "line":
        for step in drawn.panel["fieldConfig"]["defaults"]["thresholds"]["steps"]:
            if step["value"] is not None and step["value"] <= axes.get_ylim()[1] * 1.5:
                axes.axhline(step["value"], color=NAMED[step["color"]], linewidth=0.9, linestyle="--")


def _number(axes: Axes, drawn: Drawn) -> None:
    axes.set_axis_on()
    axes.set_xticks([])
    axes.set_yticks([])
    line = drawn.lines[0] if drawn.lines else Line("", [], {})
    colour = TEXT
    for step in drawn.panel["fieldConfig"]["defaults"]["thresholds"]["steps"]:
        if step["value"] is None or line.last >= step["value"]:
            colour = NAMED[step["color"]]
    values = np.array(line.values)
    if len(values) > 1 and np.isfinite(values).any():
        low, high = np.nanmin(values), np.nanmax(values)
        height = 0.3 * (values - low) / (high - low or 1.0)
        axes.fill_between(np.linspace(0, 1, len(values)), height, color=colour, alpha=0.25, linewidth=0)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    shown = with_unit(line.last, drawn.unit) if line.points else "no data"
    axes.text(0.5, 0.6, shown, color=colour, fontsize=17, ha="center", va="center")


def _heat(axes: Axes, drawn: Drawn) -> None:
    """Buckets are cumulative; a row is what lies between two bounds. Empty rows at both ends are left out."""
    lines = sorted(drawn.lines, key=lambda line: float(line.labels.get("le", "inf")))
    if not lines:
        return
    grid = sorted({at for line in lines for at in line.at})
    table = np.diff(np.vstack([np.zeros(len(grid)), *(_on(grid, line) for line in lines)]), axis=0)
    used = np.flatnonzero(table.sum(axis=1) > 0)
    first, last = (int(used[0]), int(used[-1])) if len(used) else (0, len(lines) - 1)
    rows = np.sqrt(np.clip(table[first : last + 1], 0, None))
    axes.pcolormesh(np.array(grid), np.arange(len(rows)) + 0.5, rows, cmap=HEAT, shading="nearest")
    ticks = range(0, len(rows), max(1, len(rows) // 8))
    bounds = [float(lines[first + row].labels["le"]) for row in ticks]
    axes.set_yticks([row + 1.0 for row in ticks], [with_unit(bound, drawn.unit) for bound in bounds])
    axes.set_ylim(0, len(rows))
    _over_time(axes, drawn)


def _states(axes: Axes, drawn: Drawn) -> None:
    (mapping,) = drawn.panel["fieldConfig"]["defaults"]["mappings"]
    for row, line in enumerate(drawn.lines):
        axes.text(drawn.span_s * 0.005, row + 0.42, line.name, color=TEXT, fontsize=SMALL)
        for value, run in itertools.groupby(line.points, key=lambda point: point[1]):
            first, *_ = times = [at for at, _ in run]
            length = times[-1] - first + 1.0
            state = mapping["options"][f"{value:g}"]
            axes.barh(row, length, left=first, height=0.7, color=NAMED[state["color"]], linewidth=0)
            if length > drawn.span_s * 0.05:
                axes.text(
                    first + length / 2, row, state["text"], color=BACKGROUND, fontsize=8, ha="center", va="center"
                )
    axes.set_yticks([])
    axes.set_ylim(-0.6, max(len(drawn.lines), 1) - 0.2)
    _over_time(axes, drawn)


def _table(axes: Axes, drawn: Drawn) -> None:
    _blank(axes)
    hidden = set(drawn.panel["transformations"][0]["options"]["excludeByName"])
    shown = sorted(drawn.lines, key=lambda line: -line.last)[:9]
    names = [name for name in (shown[0].labels if shown else {}) if name not in hidden]
    cells = [[*(line.labels.get(name, "") for name in names)] for line in shown]
    if "Value" not in hidden:
        names.append("value")
        cells = [[*row, with_unit(line.last, drawn.unit)] for row, line in zip(cells, shown, strict=True)]
    widths = [max([len(name), *(len(row[column]) for row in cells)]) + 2 for column, name in enumerate(names)]
    space = drawn.panel["gridPos"]["w"] * 10
    room, size = max(sum(widths), space), SMALL * min(1.0, space / max(sum(widths), 1))
    for column, name in enumerate(names):
        left = 0.015 + 0.98 * sum(widths[:column]) / room
        axes.text(left, 0.93, name, color="#8ab8ff", fontsize=size)
        for row, texts in enumerate(cells):
            axes.text(left, 0.83 - 0.095 * row, texts[column], color=TEXT, fontsize=size)


def _prose(axes: Axes, drawn: Drawn) -> None:
    _blank(axes)
    width = int(drawn.panel["gridPos"]["w"] * 8.5)
    lines: list[str] = []
    for line in re.sub(r"\n {3}", " ", drawn.panel["options"]["content"]).splitlines():
        if not set(line) <= set("|- "):
            plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", line.replace("**", "").replace("`", ""))
            cells = [cell.strip() for cell in plain.strip("|").split("|")]
            text = f"{cells[0]:<20} {cells[1]}" if line.startswith("|") else plain
            lines += textwrap.wrap(text, width, subsequent_indent=" " * (21 if line.startswith("|") else 3)) or [""]
    room = int(drawn.panel["gridPos"]["h"] * 2.6)
    kept = lines if len(lines) <= room else [*lines[: room - 1], "…"]
    axes.text(0.015, 0.98, "\n".join(kept), color=TEXT, fontsize=6, va="top", family="monospace", linespacing=1.15)


def _blank(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)


def with_unit(value: float, unit: str, digits: int = 3) -> str:
    """Grafana's words for a value: `12.5 ms` for 0.0125 of unit `s`."""
    if math.isnan(value):
        return "–"
    if unit == "s":
        if value == 0:
            return "0 s"
        factor, name = next((each for each in _SECONDS if abs(value) >= each[0]), _SECONDS[-1])
        return f"{value / factor:.{digits}g} {name}"
    if unit == "percentunit":
        return f"{value * 100:.{digits}g} %" if abs(value) < 0.9995 else f"{value * 100:.2f} %"
    value *= 1e6 if unit == "decmbytes" else 1.0
    for factor, prefix in _FACTORS:
        if abs(value) >= factor:
            return f"{value / factor:.{digits}g} {prefix}{_SUFFIXES.get(unit, '').strip()}".rstrip()
    return f"{value:.{digits}g}{_SUFFIXES.get(unit, '')}"


_KINDS = {
    "timeseries": _lines,
    "stat": _number,
    "heatmap": _heat,
    "state-timeline": _states,
    "table": _table,
    "text": _prose,
}
