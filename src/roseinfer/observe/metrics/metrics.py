"""Counts facts and renders the pages of the metrics in `catalogue.py`.

Facts come on the event loop, a page may be rendered in any thread. One lock covers each fact and the copy that a scrape
takes, so a page shows one moment: every histogram's count is its +Inf bucket, and the series agree with each other. It
is held for some microseconds; formatting, which takes milliseconds, happens on the copy, outside of it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import msgspec
from prometheus_client.samples import Exemplar as MetricExemplar

from roseinfer.messages import EngineInfo
from roseinfer.observe.gaps.attribution import Attribution
from roseinfer.observe.hub import WriteObserver, Writes
from roseinfer.observe.metrics import protobuf
from roseinfer.observe.metrics.catalogue import CATALOGUE, GC_PAUSE, LOAD, NS_PER_S, SCRAPE_DURATION, VLLM_NAMES
from roseinfer.observe.metrics.exemplars import WITH_EXEMPLARS, Exemplar, ExemplarShelf
from roseinfer.observe.metrics.histogram import Histogram
from roseinfer.observe.metrics.protobuf import Exemplars, Values
from roseinfer.observe.metrics.row import AtFinish, AtScrape, AtStep, AtWrites, InfoAtScrape, Row, ServerState
from roseinfer.observe.metrics.text import TextEncoder
from roseinfer.observe.metrics.totals import Child, Load, Running, Totals, children_of
from roseinfer.records import Advanced, LifecycleState, RequestTimeline, StepRecord, Violation
from roseinfer.runtime.host import HostFacts

_HOST_EVERY_NS = NS_PER_S  # the kernel makes its files anew for each reader, core by core


class Metrics(WriteObserver):
    """The observer that counts. Every series exists at 0 before the first request."""

    def __init__(
        self,
        model_name: str,
        version: str,
        num_dropped_log_lines: Callable[[], int] = lambda: 0,
        take_gc_pauses_ns: Callable[[], Sequence[int]] = tuple,
        *,
        has_vllm_names: bool = True,
    ) -> None:
        self._model_name = model_name
        self._num_dropped_log_lines = num_dropped_log_lines
        self._take_gc_pauses_ns = take_gc_pauses_ns
        self.render_start_listeners: list[Callable[[int], None]] = []  # called with a page's begin
        self.render_listeners: list[Callable[[int, int], None]] = []  # called with a page's begin and end
        self._spent_ns: Callable[[], int] = lambda: 0
        self._render_ns = 0
        self._lock = threading.Lock()
        self.totals = Totals(version)
        self._state = self.totals.state
        self._cells = {
            row.name: {child: Histogram(row.buckets) for child in children_of(row)}
            for row in CATALOGUE
            if row.kind == "histogram"
        } | self.totals.cells
        self._shelves = {
            row.name: {child: ExemplarShelf(row.buckets) for child in self._cells[row.name]}
            for row in CATALOGUE
            if row.name in WITH_EXEMPLARS
        }
        self._clock_offset_ns = time.time_ns() - time.monotonic_ns()
        self.num_dropped_spans: Callable[[], int] = lambda: 0  # reports how many spans were lost
        self.read_host: Callable[[int], HostFacts] = lambda _: HostFacts()  # for the engine's process
        self._host_read_ns: float = -_HOST_EVERY_NS
        histograms = [row for row in CATALOGUE if row.kind == "histogram"]
        self._at_step = [(row.source, self._cells[row.name]) for row in histograms if isinstance(row.source, AtStep)]
        self._at_writes = [
            (row.source, self._cells[row.name][()]) for row in CATALOGUE if isinstance(row.source, AtWrites)
        ]
        self._at_finish = [
            (row.source, self._cells[row.name]) for row in histograms if isinstance(row.source, AtFinish)
        ]
        self._gc_pauses, self._scrapes = self._cells[GC_PAUSE][()], self._cells[SCRAPE_DURATION][()]
        self._copies: dict[str, dict[Child, Histogram]] = {row.name: {} for row in histograms}  # of the last snapshot
        hidden = frozenset() if has_vllm_names else VLLM_NAMES
        self._shown, self._shown_load = (
            [(row, self._reader(row)) for row in rows if row.name not in hidden] for rows in (CATALOGUE, LOAD)
        )
        self._text = TextEncoder(model_name)
        self._messages: dict[str, tuple[Values, Exemplars, bytes]] = {}  # in protobuf, of the last page, by name

    def watch(self, attribution: Attribution, spent_ns: Callable[[], int], *, is_front_end: bool = True) -> None:
        """Exposes what `attribution` finds, and what the front end has spent; here it renders too, or elsewhere."""
        self._state.gap_ns, self._state.num_slow_gaps = attribution.total_ns, attribution.num_slow_gaps
        self._spent_ns = (lambda: spent_ns() + self._render_ns) if is_front_end else spent_ns

    def set_engine_info(self, info: EngineInfo) -> None:
        """Takes what the engine, which is now ready, turned out to be."""
        with self._lock:
            self._state.engine = info

    def resume(self, running: Running, num_dropped: int, num_telemetry_restarts: int) -> None:
        """Takes the front end's counts, after facts were lost or when this process is new."""
        with self._lock:
            self.totals.restore(running)
            self._state.num_dropped_facts = num_dropped
            self._state.num_telemetry_restarts = num_telemetry_restarts

    def put_exemplars(self, found: Iterable[tuple[str, Exemplar]]) -> None:
        """Shows where observed values came from: each names a metric, and a trace that is kept."""
        with self._lock:
            for name, exemplar in found:
                self._shelves[name][exemplar.label_values].put(exemplar)

    def forget_exemplars(self, trace_id: str) -> None:
        """Removes the exemplars of a trace that is not kept after all."""
        with self._lock:
            for shelves in self._shelves.values():
                for shelf in shelves.values():
                    shelf.forget(trace_id)

    def on_lifecycle(self, state: LifecycleState) -> None:
        with self._lock:
            self.totals.on_lifecycle(state)

    def on_start(self, timeline: RequestTimeline) -> None:
        with self._lock:
            self.totals.on_start(timeline)

    def on_refusal(self, code: str) -> None:
        with self._lock:
            self.totals.on_refusal(code)

    def on_stall(self, since_ns: int) -> None:
        with self._lock:
            self.totals.on_stall(since_ns)

    def on_rest(self, violations: Sequence[Violation]) -> None:
        with self._lock:
            self.totals.on_rest(violations)

    def on_step(self, record: StepRecord, advanced: Advanced) -> None:
        with self._lock:
            self.totals.on_step(record, advanced)
            for source, cells in self._at_step:
                if values := source.values(record, advanced):
                    self._state.num_refused_intervals += cells[source.labels(record)].add(values)
            self._count_collections()

    def on_writes(self, writes: Writes) -> None:
        with self._lock:
            for source, cell in self._at_writes:
                self._state.num_refused_intervals += cell.add_array(source.values(writes))

    def on_finish(self, timeline: RequestTimeline) -> None:
        with self._lock:
            self.totals.on_finish(timeline)
            for source, cells in self._at_finish:
                if values := source.values(timeline):
                    self._state.num_refused_intervals += cells[source.labels(timeline)].add(values)

    def _count_collections(self) -> None:
        if pauses_ns := self._take_gc_pauses_ns():
            self._gc_pauses.add([pause_ns / NS_PER_S for pause_ns in pauses_ns])

    def render(self, accept: str) -> tuple[bytes, str]:
        """Returns the page and its type, in the format that the Accept header asks for.

        It is OpenMetrics, Prometheus' protobuf, which alone has native histograms, or else Prometheus' text.

        May be called in any thread, and calls its listeners there; two at once are allowed, if wasteful.
        """
        start_ns = time.monotonic_ns()
        for begins in self.render_start_listeners:
            begins(start_ns)
        try:
            snapshot = self.snapshot()
            if protobuf.is_preferred(accept):
                page, content_type = self._encode_protobuf(snapshot), protobuf.CONTENT_TYPE
            else:
                page, content_type = self._text.encode(accept, snapshot)
        finally:
            end_ns = time.monotonic_ns()
            for listener in self.render_listeners:
                listener(start_ns, end_ns)
        with self._lock:
            self._render_ns += end_ns - start_ns
            self._scrapes.add([(end_ns - start_ns) / NS_PER_S])
        return page, content_type

    def render_load(self, accept: str, load: Load | None = None) -> tuple[bytes, str]:
        """Returns the page of the rows of `LOAD` alone, and its type: cheap enough for the event loop.

        `load` is newer than the facts that are here.
        """
        start_ns = time.monotonic_ns()
        with self._lock:
            state = self._state if load is None else replace(self._state, **msgspec.structs.asdict(load))
            found: list[tuple[Row, Values, Exemplars]] = [(row, read(state), {}) for row, read in self._shown_load]
        page, content_type = self._text.encode(accept, found)
        with self._lock:
            self._render_ns += time.monotonic_ns() - start_ns
        return page, content_type

    def _encode_protobuf(self, snapshot: Iterable[tuple[Row, Values, Exemplars]]) -> bytes:
        pieces = []
        for row, values, exemplars in snapshot:
            kept = self._messages.get(row.name)
            if kept is None or kept[0] != values or kept[1] != exemplars:
                labels = {"model_name": self._model_name} if row.is_per_model else {}
                message = protobuf.encode_family(row, values, exemplars, labels)
                kept = self._messages[row.name] = values, exemplars, message
            pieces.append(kept[2])
        return b"".join(pieces)

    def snapshot(self) -> list[tuple[Row, Values, Exemplars]]:
        """Returns every metric that is shown, all of one moment."""
        with self._lock:
            self._count_collections()
            state = self._state
            state.num_dropped_log_lines = self._num_dropped_log_lines()
            state.observability_ns = self._spent_ns()
            state.num_dropped_spans = self.num_dropped_spans()
            now_ns = time.monotonic_ns()
            if now_ns - self._host_read_ns >= _HOST_EVERY_NS:
                state.host, self._host_read_ns = self.read_host(state.engine.pid if state.engine else 0), now_ns
            state.stalled_s = (now_ns - state.stalled_since_ns) / NS_PER_S if state.stalled_since_ns else 0.0
            if state.last_step_end_ns:
                age_s = (now_ns - state.last_step_end_ns) / NS_PER_S
                state.last_step_unix_s = time.time() - age_s
            return [(row, read(state), self._exemplars(row)) for row, read in self._shown]

    def _exemplars(self, row: Row) -> Exemplars:
        """Returns the exemplars of a metric by its label values, where there are any."""
        if row.name not in self._shelves:
            return {}
        return {
            child: [
                None if found is None else MetricExemplar(found.labels, found.value_s, self._unix_s(found.at_ns))
                for found in shelf.newest
            ]
            for child, shelf in self._shelves[row.name].items()
            if any(shelf.newest)
        }

    def _unix_s(self, at_ns: int) -> float:
        """Returns always the same for the same stamp: a scraper would take another time for another exemplar."""
        return (at_ns + self._clock_offset_ns) / NS_PER_S

    def _reader(self, row: Row) -> Callable[[ServerState], Values]:
        """Returns what reads the values of a metric."""
        match row.source:
            case AtScrape(values=found) if row.labels:
                return lambda state: {(child,): value for child, value in found(state).items()}
            case AtScrape(values=one):
                return lambda state: {(): one(state)[""]}
            case InfoAtScrape(names=names, values=known):
                series = [(name,) for name in names]
                return lambda state: dict(zip(series, values, strict=True)) if (values := known(state)) else {}
        cells = self._cells[row.name]
        if row.kind == "counter":
            return lambda _: {child: cell.total for child, cell in cells.items()}
        return lambda _: self._copied(row.name, cells)

    def _copied(self, name: str, cells: dict[Child, Histogram]) -> Values:
        copies = self._copies[name]
        changed = {child: cell.copy() for child, cell in cells.items() if not cell.is_as(copies.get(child))}
        if changed:  # a new dictionary: the last one may still be read
            copies = self._copies[name] = {child: changed.get(child) or copies[child] for child in cells}
        return copies
