"""The words in which the catalogue is written: a row, its label, and where its values come from; knows no metric.

Telemetry libraries stay out of here: `metrics.py` turns rows and values into theirs.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from roseinfer.messages import EngineInfo
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.writes import Writes
from roseinfer.records import Advanced, Invariant, LifecycleState, RequestTimeline, StepRecord


@dataclass(slots=True)
class ServerState:
    """The last of each fact: what gauges are read from when somebody scrapes."""

    version: str
    lifecycle: LifecycleState = LifecycleState.STARTING
    engine: EngineInfo | None = None
    last_step: StepRecord | None = None
    last_step_end_ns: int = 0
    last_step_unix_s: float = 0.0
    num_received: int = 0
    num_finished: int = 0
    num_refusals: Counter[str] = field(default_factory=Counter)  # by code
    num_refused_intervals: int = 0
    num_dropped_log_lines: int = 0
    gap_ns: Mapping[Cause, int] = field(default_factory=lambda: dict.fromkeys(Cause, 0))
    num_slow_gaps: Mapping[Cause, int] = field(default_factory=lambda: dict.fromkeys(Cause, 0))
    observability_ns: int = 0
    num_dropped_spans: int = 0
    num_restarts: int = 0
    num_violations: dict[Invariant, int] = field(default_factory=lambda: dict.fromkeys(Invariant, 0))


@dataclass(frozen=True, slots=True)
class AtStep:
    """Values taken from each step and the timelines it advanced; `label` is asked only when there are values."""

    values: Callable[[StepRecord, Advanced], Sequence[float]]
    label: Callable[[StepRecord], str] = lambda _: ""


@dataclass(frozen=True, slots=True)
class AtWrites:
    """Values taken from socket writes, some dozens of them at a time."""

    values: Callable[[Writes], npt.NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class AtFinish:
    """Values taken from each request when it has ended; `label` is asked only when there are values."""

    values: Callable[[RequestTimeline], Sequence[float]]
    label: Callable[[RequestTimeline], str] = lambda _: ""


@dataclass(frozen=True, slots=True)
class AtScrape:
    """Value by label value, computed when somebody asks."""

    values: Callable[[ServerState], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class InfoAtScrape:
    """The labels of a series that is always 1: their names, and their values in this order or, not known yet, none."""

    names: tuple[str, ...]
    values: Callable[[ServerState], Sequence[str | int]]


@dataclass(frozen=True, slots=True)
class OfScrapes:
    """Seconds that each scrape took; the exporter itself knows them."""


@dataclass(frozen=True, slots=True)
class OfCollections:
    """Seconds that each garbage collection of the front end took."""


Source = AtStep | AtWrites | AtFinish | AtScrape | InfoAtScrape | OfScrapes | OfCollections


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A label and the closed set of its values, each of which exists at 0 from the start."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric. `buckets` are the upper bounds of a histogram, the unbounded one left out."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    help: str
    source: Source
    unit: str = ""
    label: Label | None = None
    buckets: tuple[float, ...] = ()
    is_per_model: bool = True


def histogram(
    name: str, unit: str, buckets: tuple[float, ...], source: Source, meaning: str, label: Label | None = None
) -> Row:
    return Row(name=name, kind="histogram", unit=unit, buckets=buckets, source=source, help=meaning, label=label)


def counter(name: str, unit: str, source: Source, meaning: str, label: Label | None = None) -> Row:
    return Row(name=name, kind="counter", unit=unit, source=source, help=meaning, label=label)


def gauge(
    name: str,
    unit: str,
    values: Callable[[ServerState], Mapping[str, float]],
    meaning: str,
    label: Label | None = None,
) -> Row:
    return Row(name=name, kind="gauge", unit=unit, source=AtScrape(values), help=meaning, label=label)


def info(name: str, source: InfoAtScrape, meaning: str) -> Row:
    return Row(name=name, kind="info", source=source, help=meaning)
