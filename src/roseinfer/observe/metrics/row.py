"""A row of the table of metrics: its name and meaning, and where its values come from."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from roseinfer.messages import EngineInfo
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.hub import Writes
from roseinfer.records import Advanced, Invariant, LifecycleState, RequestTimeline, StepRecord
from roseinfer.runtime.host import HostFacts

DRAFT_OUTCOMES = ("accepted", "rejected")


@dataclass(slots=True)
class ServerState:
    """The last of each fact, which gauges are read from at a scrape."""

    version: str
    lifecycle: LifecycleState = LifecycleState.STARTING
    engine: EngineInfo | None = None
    last_step: StepRecord | None = None
    last_step_end_ns: int = 0
    last_step_unix_s: float = 0.0
    stalled_since_ns: int = 0  # an engine with work; 0 for one that goes on
    stalled_s: float = 0.0
    host: HostFacts = field(default_factory=HostFacts)
    num_received: int = 0
    num_finished: int = 0
    num_refusals: Counter[str] = field(default_factory=Counter)  # by code
    num_refused_intervals: int = 0
    num_dropped_log_lines: int = 0
    gap_ns: Mapping[Cause, int] = field(default_factory=lambda: dict.fromkeys(Cause, 0))
    num_slow_gaps: Mapping[Cause, int] = field(default_factory=lambda: dict.fromkeys(Cause, 0))
    observability_ns: int = 0
    num_dropped_spans: int = 0
    num_dropped_facts: int = 0
    num_telemetry_restarts: int = 0
    num_restarts: int = 0
    start_unix_s: float = field(default_factory=time.time)
    num_drafts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DRAFT_OUTCOMES, 0))
    num_violations: dict[Invariant, int] = field(default_factory=lambda: dict.fromkeys(Invariant, 0))


@dataclass(frozen=True, slots=True)
class AtStep:
    """Values from each step and the timelines it advanced; `labels` is called only when there are values."""

    values: Callable[[StepRecord, Advanced], Sequence[float]]
    labels: Callable[[StepRecord], tuple[str, ...]] = lambda _: ()


@dataclass(frozen=True, slots=True)
class AtWrites:
    """Values from socket writes, some dozens of them at a time."""

    values: Callable[[Writes], npt.NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class AtFinish:
    """Values from each request when it has ended; `labels` is called only when there are values."""

    values: Callable[[RequestTimeline], Sequence[float]]
    labels: Callable[[RequestTimeline], tuple[str, ...]] = lambda _: ()


@dataclass(frozen=True, slots=True)
class AtScrape:
    """Value by the value of the one label, or under "" without one, computed at a scrape."""

    values: Callable[[ServerState], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class InfoAtScrape:
    """The labels of a series that is always 1: their names, and their values in this order or, not known yet, none."""

    names: tuple[str, ...]
    values: Callable[[ServerState], Sequence[str | int]]


@dataclass(frozen=True, slots=True)
class AtExporter:
    """Values that the exporter adds itself: it finds the metric by its name."""


Source = AtStep | AtWrites | AtFinish | AtScrape | InfoAtScrape | AtExporter


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
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    is_per_model: bool = True

    @property
    def stated_unit(self) -> str:
        """The unit on a page: OpenMetrics demands that a family's name ends in the one it states."""
        return self.unit if self.name.removesuffix("_total").endswith(f"_{self.unit}") else ""


def histogram(name: str, unit: str, buckets: tuple[float, ...], source: Source, meaning: str, *labels: Label) -> Row:
    return Row(name=name, kind="histogram", unit=unit, buckets=buckets, source=source, help=meaning, labels=labels)


def counter(name: str, unit: str, source: Source, meaning: str, *labels: Label) -> Row:
    return Row(name=name, kind="counter", unit=unit, source=source, help=meaning, labels=labels)


def gauge(
    name: str, unit: str, values: Callable[[ServerState], Mapping[str, float]], meaning: str, *labels: Label
) -> Row:
    return Row(name=name, kind="gauge", unit=unit, source=AtScrape(values), help=meaning, labels=labels)


def info(name: str, source: InfoAtScrape, meaning: str) -> Row:
    return Row(name=name, kind="info", source=source, help=meaning)
