"""Counts requests, tokens and errors: the counters of the catalogue that facts feed, and nothing that needs memory.

The front end keeps its own, so that a telemetry process that is started again, or that missed facts, shows the true
counts: `running` is what travels, and `restore` takes it over.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import product

import msgspec

from roseinfer.observe.metrics.catalogue import CATALOGUE, OTHER, REJECTION_CODES
from roseinfer.observe.metrics.histogram import Histogram
from roseinfer.observe.metrics.row import AtFinish, AtStep, Row, ServerState
from roseinfer.records import Advanced, Invariant, LifecycleState, Observer, RequestTimeline, StepRecord, Violation

Child = tuple[str, ...]  # the values of a metric's own labels


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """All counts of one moment, since the server's start, and the newest step."""

    counters: list[tuple[str, list[str], float]]  # metric, label values and count, where that is not 0
    num_received: int
    num_finished: int
    num_restarts: int
    stalled_since_ns: int
    start_unix_s: float
    last_step: StepRecord | None
    last_step_end_ns: int
    num_refusals: dict[str, int]
    num_drafts: dict[str, int]
    num_violations: dict[Invariant, int]


class Load(msgspec.Struct, frozen=True, array_like=True):
    """What `/metrics/load` shows that changes from moment to moment."""

    last_step: StepRecord | None
    num_received: int
    num_finished: int


_PLAIN = (
    "num_received",
    "num_finished",
    "num_restarts",
    "stalled_since_ns",
    "start_unix_s",
    "last_step",
    "last_step_end_ns",
)


class Totals(Observer):
    """The observer that counts. Every counter exists at 0 before the first request."""

    def __init__(self, version: str = "") -> None:
        self.state = ServerState(version=version)
        # A counter is a histogram without bounds: it takes the same values, and nothing negative.
        self.cells: dict[str, dict[Child, Histogram]] = {
            row.name: {child: Histogram(()) for child in children_of(row)}
            for row in CATALOGUE
            if row.kind == "counter" and isinstance(row.source, AtStep | AtFinish)
        }
        counted = [(row.source, self.cells[row.name]) for row in CATALOGUE if row.name in self.cells]
        self._at_step = [(source, cells) for source, cells in counted if isinstance(source, AtStep)]
        self._at_finish = [(source, cells) for source, cells in counted if isinstance(source, AtFinish)]

    def on_lifecycle(self, state: LifecycleState) -> None:
        if state is LifecycleState.STARTING and self.state.lifecycle is not state:
            self.state.num_restarts += 1
            self.state.stalled_since_ns = 0
        self.state.lifecycle = state
        if state in {LifecycleState.STARTING, LifecycleState.FAILED}:
            self.state.last_step = None  # a dead engine runs nothing, whatever its last step said

    def on_start(self, timeline: RequestTimeline) -> None:  # noqa: ARG002 - it is only counted
        self.state.num_received += 1

    def on_refusal(self, code: str) -> None:
        self.state.num_refusals[code if code in REJECTION_CODES else OTHER] += 1

    def on_stall(self, since_ns: int) -> None:
        self.state.stalled_since_ns = since_ns

    def on_rest(self, violations: Sequence[Violation]) -> None:
        for violation in violations:
            self.state.num_violations[violation.invariant] += 1

    def on_step(self, record: StepRecord, advanced: Advanced) -> None:
        self.state.last_step, self.state.last_step_end_ns = record, record.end_ns
        if record.num_draft_tokens:
            self.state.num_drafts["accepted"] += record.num_accepted_tokens
            self.state.num_drafts["rejected"] += record.num_draft_tokens - record.num_accepted_tokens
        for source, cells in self._at_step:
            if values := source.values(record, advanced):
                self.state.num_refused_intervals += cells[source.labels(record)].add(values)

    def on_finish(self, timeline: RequestTimeline) -> None:
        self.state.num_finished += 1
        for source, cells in self._at_finish:
            if values := source.values(timeline):
                self.state.num_refused_intervals += cells[source.labels(timeline)].add(values)

    def load(self) -> Load:
        return Load(self.state.last_step, self.state.num_received, self.state.num_finished)

    def running(self) -> Running:
        """Returns all counts as they are now."""
        state = self.state
        return Running(
            counters=[
                (name, list(child), cell.total)
                for name, cells in self.cells.items()
                for child, cell in cells.items()
                if cell.total
            ],
            num_refusals=dict(state.num_refusals),
            num_drafts=dict(state.num_drafts),
            num_violations=dict(state.num_violations),
            **{name: getattr(state, name) for name in _PLAIN},
        )

    def restore(self, running: Running) -> None:
        """Takes the counts of the front end in the place of its own."""
        for name, child, total in running.counters:
            self.cells[name][tuple(child)].total = total
        state = self.state
        for name in _PLAIN:
            setattr(state, name, getattr(running, name))
        state.num_refusals = Counter(running.num_refusals)
        state.num_drafts = dict(running.num_drafts)
        state.num_violations = dict(running.num_violations)


def children_of(row: Row) -> list[Child]:
    """Returns the label values of each series of a metric, those of the model left out."""
    return list(product(*(label.values for label in row.labels)))
