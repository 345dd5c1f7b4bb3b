"""Decides which requests and steps become spans, and which exemplars lead to them.

Nothing is measured here. A trace id is given when a request arrives, so that logs can name it; whether the trace is
kept is decided when a gap is slow or the request has ended, and its spans are then made from its timeline.
"""

import time
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import format_trace_id

from roseinfer.config.options import Config, TracingConfig
from roseinfer.errors import ConfigError, QueueTimeout
from roseinfer.messages import EngineInfo
from roseinfer.observe import otel
from roseinfer.observe.gaps.attribution import Attribution
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.metrics import exemplars
from roseinfer.observe.metrics.catalogue import NS_PER_S
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.observe.tracing import semconv
from roseinfer.observe.tracing.export import SpanExport
from roseinfer.observe.tracing.head_sampling import HeadSampler, make_propagator, make_sampler
from roseinfer.observe.tracing.spans import MAX_GAP_EVENTS, PlannedIds, Spans, TraceContext, Value
from roseinfer.records import Advanced, LifecycleState, Observer, RequestTimeline, StepRecord

_DEFAULT_MAX_QUEUED, _DEFAULT_MAX_BATCH = 2048, 512  # spans, as in the SDK, which refuses a batch above the queue
_MAX_RECENT_STEPS = 256  # in which a slow gap is looked up that has just been found
_NUM_STEP_STAMPS = 1 << 16  # steps back to which a token finds the id of its step


class Export(Protocol):
    """`SpanExport`, as far as the observer knows it."""

    def admit(self) -> bool:
        """Decides whether the spans that end until the next call are exported, and returns it."""

    def close(self, timeout_s: float) -> None: ...


class Tracing(Observer):
    """The observer that decides about traces. It belongs to the event loop."""

    def __init__(
        self,
        config: TracingConfig,
        head_sampler: HeadSampler,
        spans: Spans,
        export: Export,
        metrics: Metrics,
    ) -> None:
        """`export` is where the spans arrive that `spans` makes."""
        self._head_sampler = head_sampler
        self._spans = spans
        self._export = export
        self._metrics = metrics
        self._slow_ttft_ns = config.slow_ttft_s * NS_PER_S
        self._step_interval = config.step_interval
        self._contexts: dict[str, TraceContext] = {}
        self._recent: deque[tuple[StepRecord, Advanced]] = deque(maxlen=_MAX_RECENT_STEPS)
        self._exported_step_ids: deque[int] = deque(maxlen=_MAX_RECENT_STEPS)  # or due once known
        self._stamps = array("q", bytes(8 * _NUM_STEP_STAMPS))  # tokens_ns of step i at i modulo the size
        self._last_step_id = 0

    # --- facts --------------------------------------------------------------------------------------------------------

    def note_startup(self, info: EngineInfo, entered_ns: Mapping[LifecycleState, int]) -> None:
        """Exports the spans of a start-up, which ends just now."""
        ready_ns = entered_ns.get(LifecycleState.READY, time.monotonic_ns())
        start_ns = entered_ns.get(LifecycleState.STARTING, ready_ns)
        loading_ns = entered_ns.get(LifecycleState.LOADING, start_ns)
        self._export.admit()
        self._spans.of_startup((start_ns, loading_ns, ready_ns), info.startup_s)

    def close(self) -> None:
        """Delivers spans, as far as the flush timeout allows."""
        self._export.close(otel.FLUSH_TIMEOUT_S)

    def on_start(self, timeline: RequestTimeline) -> None:
        self._contexts[timeline.request_id] = self._head_sampler.begin(timeline)

    def on_step(self, record: StepRecord, advanced: Advanced) -> None:
        step_id = record.step_id
        self._stamps[step_id % _NUM_STEP_STAMPS] = record.tokens_ns
        self._last_step_id = step_id
        self._recent.append((record, advanced))
        if step_id in self._exported_step_ids:
            self._export_step(record, advanced, is_slow=True)
        elif self._step_interval and step_id % self._step_interval == 0:
            self._exported_step_ids.append(step_id)
            self._export_step(record, advanced, is_slow=False)

    def note_slow_gap(self, gap: Gap, timeline: RequestTimeline) -> None:
        """Keeps the trace of a request with a slow gap, and exports the step that ended the gap."""
        context = self._contexts.get(timeline.request_id)
        if context is None:
            return
        context.is_kept = True
        index = bisect_right(timeline.token_ns, gap.end_ns) - 1  # the gap may be one between writes
        step_id = (self._step_id_of(timeline.token_ns[index]) if index >= 0 else None) or gap.step_id
        found = msgspec.structs.replace(gap, step_id=step_id)
        insort(context.slow_gaps, found, key=lambda slow: -slow.duration_ns)
        del context.slow_gaps[MAX_GAP_EVENTS:]
        if index > 0:
            exemplar = exemplars.of_gap(timeline, index, step_id, context.span_id)
            self._metrics.put_exemplars([(exemplars.INTER_TOKEN_LATENCY, exemplar)])
        self._note_slow_step(step_id)

    def on_finish(self, timeline: RequestTimeline) -> None:
        context = self._contexts.pop(timeline.request_id, None)
        if context is None or not (context.is_kept or self._is_slow(timeline)):
            return
        is_admitted = self._export.admit()
        self._spans.of_request(timeline, context)
        if is_admitted:
            found = exemplars.of_request(timeline, self._step_id_of, context.span_id)
            self._metrics.put_exemplars(list(found))
        elif context.slow_gaps:
            self._metrics.forget_exemplars(timeline.trace_id)

    def on_resume(self, timelines: Sequence[RequestTimeline]) -> None:
        contexts, self._contexts = self._contexts, {}
        for timeline in timelines:
            self._contexts[timeline.request_id] = contexts.get(timeline.request_id) or self._head_sampler.begin(
                timeline
            )

    # --- decisions ----------------------------------------------------------------------------------------------------

    def _is_slow(self, timeline: RequestTimeline) -> bool:
        """Returns whether it ended badly, or was late with its first token; slow gaps came before."""
        firsts_ns = (timeline.write_ns if timeline.is_streamed else timeline.token_ns)[:1]
        is_late = any(first_ns - timeline.recv_ns > self._slow_ttft_ns for first_ns in firsts_ns)
        # The time for the queue may be over before the engine has heard of the request.
        return is_late or timeline.has_failed or timeline.error_code == QueueTimeout.code

    def _note_slow_step(self, step_id: int) -> None:
        """Exports the step, once however many gaps it ended; if it is not known yet, when it is."""
        if step_id in self._exported_step_ids:
            return
        self._exported_step_ids.append(step_id)
        for record, advanced in reversed(self._recent):
            if record.step_id == step_id:
                self._export_step(record, advanced, is_slow=True)
                return

    def _export_step(self, record: StepRecord, advanced: Advanced, *, is_slow: bool) -> None:
        contexts = [self._contexts.get(timeline.request_id) for timeline in advanced]
        self._export.admit()
        self._spans.of_step(record, [context.link() for context in contexts if context], is_slow=is_slow)

    # --- steps by their stamps ----------------------------------------------------------------------------------------

    def _stamp_of(self, step_id: int) -> int:
        return self._stamps[step_id % _NUM_STEP_STAMPS]

    def _step_id_of(self, tokens_ns: int) -> int | None:
        """Returns the step whose tokens were known then; step ids have no holes, and their stamps grow."""
        known = range(max(1, self._last_step_id - _NUM_STEP_STAMPS + 1), self._last_step_id + 1)
        index = bisect_left(known, tokens_ns, key=self._stamp_of)
        if index < len(known) and self._stamp_of(known[index]) == tokens_ns:
            return known[index]
        return None


def make_tracing(
    config: Config,
    version: str,
    metrics: Metrics,
    attribution: Attribution,
    exporter_names: Sequence[str],
    environment: otel.Environment,
    server_pid: int | None = None,
) -> Tracing:
    """Returns the observer that traces, with the SDK set up behind it. Raises ConfigError.

    `exporter_names` are those of `otel.exporter_names`, at least one; `server_pid` is as for `otel.make_resource`.
    """
    options = config.tracing
    attributes: dict[str, Value] = {
        semconv.GEN_AI_PROVIDER_NAME: semconv.PROVIDER,
        semconv.GEN_AI_REQUEST_MODEL: config.served_model_name,  # or another of its names
        semconv.GEN_AI_RESPONSE_MODEL: config.served_model_name,
        semconv.SERVER_ADDRESS: config.server.host,
        semconv.SERVER_PORT: config.server.port,
    }
    ids = PlannedIds()
    head_sampler = HeadSampler(make_sampler(environment, options.ratio), make_propagator(environment), ids, attributes)
    exporters = otel.make_exporters("traces", exporter_names, options.endpoint, environment)
    max_queued = int(otel.given(environment, "OTEL_BSP_MAX_QUEUE_SIZE")[1] or _DEFAULT_MAX_QUEUED)
    _, given_batch = otel.given(environment, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE")
    max_batch = int(given_batch or min(max_queued, _DEFAULT_MAX_BATCH))
    provider = _make_provider(ids, otel.make_resource(version, server_pid))

    def on_lost(trace_id: int) -> None:
        metrics.forget_exemplars(format_trace_id(trace_id))

    export = SpanExport(provider, exporters, max_queued, max_batch, on_lost)
    offset_ns = time.time_ns() - time.monotonic_ns()
    spans = Spans(provider.get_tracer("roseinfer", version), ids, offset_ns, attributes)
    tracing = Tracing(options, head_sampler, spans, export, metrics)
    metrics.num_dropped_spans = lambda: export.num_lost
    attribution.on_slow_gap.append(tracing.note_slow_gap)
    return tracing


def _make_provider(ids: PlannedIds, resource: Resource) -> TracerProvider:
    """Returns a provider that exports what it is given, since it is decided before whether a span is made."""
    try:
        limits = SpanLimits()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=ids, span_limits=limits)
