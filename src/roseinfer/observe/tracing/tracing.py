"""Decides which requests and steps become spans, and which exemplars lead to them.

Nothing is measured here. A trace id is given when a request arrives, so that logs can name it; whether the trace is
kept is decided when a gap is slow or the request has ended, and its spans are then made from its timeline. The header
`traceparent` is that of W3C Trace Context, https://www.w3.org/TR/trace-context/.
"""

import os
import random
import re
import socket
import time
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from roseinfer.config.options import Config, TracingConfig
from roseinfer.errors import ConfigError, QueueTimeout
from roseinfer.messages import EngineInfo
from roseinfer.observe.gaps.attribution import Attribution
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.metrics import exemplars
from roseinfer.observe.metrics.catalogue import NS_PER_S
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.observe.recorder.recording import ClockPair
from roseinfer.observe.tracing import semconv, spans
from roseinfer.observe.tracing.spans import Span, TraceContext, Value
from roseinfer.records import Advanced, FinishReason, LifecycleState, Observer, RequestTimeline, StepRecord

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace_id>[0-9a-f]{32})-(?P<span_id>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)
_SAMPLED = 0x01
_LOW_64_BITS = 2**64 - 1


class Parent(msgspec.Struct, frozen=True, gc=False):
    """The caller's span, which is in another process."""

    trace_id: int
    span_id: int
    is_sampled: bool


def parse_traceparent(header: str) -> Parent | None:
    """Returns the parent that the header names; None if it is empty or not in the form of the standard."""
    found = _TRACEPARENT.fullmatch(header)
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["rest"]):
        return None
    trace_id, span_id = int(found["trace_id"], 16), int(found["span_id"], 16)
    if not trace_id or not span_id:
        return None
    return Parent(trace_id, span_id, bool(int(found["flags"], 16) & _SAMPLED))


def hex_of(trace_id: int) -> str:
    """Formats a trace id as headers, logs and exemplars have it."""
    return f"{trace_id:032x}"


class Sampler:
    """Gives ids to traces and spans, and decides by chance which traces to keep."""

    def __init__(self, ratio: float, numbers: random.Random) -> None:
        self._bound = round(ratio * 2**64)
        self._numbers = numbers

    def new_trace_id(self) -> int:
        """Returns 128 random bits, not all of them 0."""
        return self._numbers.getrandbits(128) or 1

    def new_span_id(self) -> int:
        """Returns 64 random bits, not all of them 0."""
        return self._numbers.getrandbits(64) or 1

    def begin(self, timeline: RequestTimeline) -> TraceContext:
        """Returns the context of a request that has just begun, and writes its trace id into the timeline.

        The caller's decision holds, else the low 64 bits of the trace id decide: so all of a trace is decided alike.
        """
        parent = parse_traceparent(timeline.traceparent)
        if parent is not None:
            trace_id, parent_span_id, is_kept = parent.trace_id, parent.span_id, parent.is_sampled
        else:
            trace_id = int(timeline.trace_id, 16) if timeline.trace_id else self.new_trace_id()
            parent_span_id, is_kept = 0, trace_id & _LOW_64_BITS < self._bound
        timeline.trace_id = hex_of(trace_id)
        return TraceContext(trace_id, self.new_span_id(), parent_span_id, is_kept)


FLUSH_TIMEOUT_S = 1.0  # longest time that the exit waits for spans to be delivered
QUEUE_SPANS = 4096  # that may wait for the collector: what an outage of seconds leaves
_MAX_RECENT_STEPS = 256  # in which a slow gap is looked up that has just been found
_NUM_STEP_STAMPS = 1 << 16  # steps back to which a token finds the id of its step


class SpanSink(Protocol):
    """What takes spans: `SpanExport`."""

    def put(self, spans: Sequence[Span]) -> bool:
        """Takes all of them, or none; returns whether it took them."""

    def close(self, timeout_s: float) -> None: ...


class Tracing(Observer):
    """The observer that decides about traces. It belongs to the event loop."""

    def __init__(
        self,
        config: TracingConfig,
        attributes: Mapping[str, Value],
        export: SpanSink,
        metrics: Metrics,
        numbers: random.Random,
    ) -> None:
        """`attributes` are those of all request spans, `numbers` where ids come from."""
        self._attributes = attributes
        self._export = export
        self._metrics = metrics
        self._sampler = Sampler(config.ratio, numbers)
        self._slow_ttft_ns = config.slow_ttft_s * NS_PER_S
        self._step_interval = config.step_interval
        self._contexts: dict[str, TraceContext] = {}
        self._recent: deque[tuple[StepRecord, Advanced]] = deque(maxlen=_MAX_RECENT_STEPS)
        self._exported_step_ids: deque[int] = deque(maxlen=_MAX_RECENT_STEPS)  # or due once known
        self._stamps = array("q", bytes(8 * _NUM_STEP_STAMPS))  # tokens_ns of step i at i modulo the size
        self._last_step_id = 0
        self._entered_ns: dict[LifecycleState, int] = {}

    # --- facts --------------------------------------------------------------------------------------------------------

    def on_lifecycle(self, state: LifecycleState) -> None:
        self._entered_ns.setdefault(state, time.monotonic_ns())

    def set_engine_info(self, info: EngineInfo) -> None:
        """Exports the spans of the start-up, once the server is ready."""
        entered_ns = self._entered_ns
        ready_ns = entered_ns.get(LifecycleState.READY, time.monotonic_ns())
        start_ns = entered_ns.get(LifecycleState.STARTING, ready_ns)
        loading_ns = entered_ns.get(LifecycleState.LOADING, start_ns)
        new_id = self._sampler.new_span_id
        self._export.put(
            spans.startup_spans(self._sampler.new_trace_id(), (start_ns, loading_ns, ready_ns), info.startup_s, new_id)
        )

    def close(self) -> None:
        """Delivers spans, as far as the flush timeout allows."""
        self._export.close(FLUSH_TIMEOUT_S)

    def on_start(self, timeline: RequestTimeline) -> None:
        self._contexts[timeline.request_id] = self._sampler.begin(timeline)

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
        del context.slow_gaps[spans.MAX_GAP_EVENTS :]
        if index > 0:
            exemplar = exemplars.of_gap(timeline, index, step_id)
            self._metrics.put_exemplars([(exemplars.INTER_TOKEN_LATENCY, exemplar)])
        self._note_slow_step(step_id)

    def on_finish(self, timeline: RequestTimeline) -> None:
        context = self._contexts.pop(timeline.request_id)
        if not (context.is_kept or self._is_slow(timeline)):
            return
        new_id = self._sampler.new_span_id
        if self._export.put(spans.request_spans(timeline, context, self._attributes, new_id)):
            found = exemplars.of_request(timeline, self._step_id_of)
            self._metrics.put_exemplars(list(found))
        elif context.slow_gaps:
            self._metrics.forget_exemplars(timeline.trace_id)

    # --- decisions ----------------------------------------------------------------------------------------------------

    def _is_slow(self, timeline: RequestTimeline) -> bool:
        """Returns whether it ended badly, or was late with its first token; slow gaps came before."""
        firsts_ns = (timeline.write_ns if timeline.is_streamed else timeline.token_ns)[:1]
        is_late = any(first_ns - timeline.recv_ns > self._slow_ttft_ns for first_ns in firsts_ns)
        has_failed = timeline.finish_reason in {FinishReason.ERROR, FinishReason.TIMEOUT}
        return is_late or has_failed or timeline.error_code == QueueTimeout.code  # also before the engine heard of it

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
        links = [(context.trace_id, context.span_id) for context in contexts if context is not None]
        trace_id = self._sampler.new_trace_id()
        self._export.put(spans.step_spans(record, trace_id, links, is_slow, self._sampler.new_span_id))

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


def make_tracing(config: Config, version: str, metrics: Metrics, attribution: Attribution) -> list[Tracing]:
    """Returns the observer that traces, its thread running; none without an endpoint. Raises ConfigError."""
    if config.tracing.endpoint is None:
        return []
    try:
        from roseinfer.observe.tracing.export import Collector, SpanExport
        from roseinfer.observe.tracing.otlp import Encoder
    except ImportError as error:
        raise ConfigError(
            f"tracing needs the package opentelemetry-proto ({error})", param="tracing.endpoint"
        ) from None
    clock = ClockPair(time.monotonic_ns(), time.time_ns())
    resource: dict[str, Value] = {
        semconv.SERVICE_NAME: semconv.PROVIDER,
        semconv.SERVICE_VERSION: version,
        semconv.SERVICE_INSTANCE_ID: f"{socket.gethostname()}:{os.getpid()}",
    }
    encoder = Encoder(resource, version, clock)
    export = SpanExport(
        Collector(config.tracing.endpoint),
        encoder,
        QUEUE_SPANS,
        on_lost=lambda trace_id: metrics.forget_exemplars(hex_of(trace_id)),
    )
    metrics.num_dropped_spans = lambda: export.num_dropped
    export.start()
    attributes: dict[str, Value] = {
        semconv.GEN_AI_PROVIDER_NAME: semconv.PROVIDER,
        semconv.GEN_AI_REQUEST_MODEL: config.served_model_name,  # or another of its names
        semconv.GEN_AI_RESPONSE_MODEL: config.served_model_name,
        semconv.SERVER_ADDRESS: config.server.host,
        semconv.SERVER_PORT: config.server.port,
    }
    tracing = Tracing(config.tracing, attributes, export, metrics, random.Random(os.urandom(16)))  # noqa: S311 - public
    attribution.on_slow_gap.append(tracing.note_slow_gap)
    return [tracing]
