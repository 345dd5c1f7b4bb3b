"""Makes OpenTelemetry's spans of requests, steps and the start-up, with the very stamps of the facts.

Spans are made when everything has happened, so a start and an end are given and never taken. All stamps are monotonic
nanoseconds, which `Spans` places on the calendar.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import msgspec
from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)

from roseinfer.observe.gaps import intervals
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.tracing import semconv
from roseinfer.records import RequestTimeline, StepRecord

NS_PER_S = 1e9
MAX_GAP_EVENTS = 3  # of each request
MAX_SPANS = 16  # of a trace that is made at once: those of a step and its phases are the most

Value = str | bool | int | float | Sequence[str]


class PlannedIds(RandomIdGenerator):
    """Random ids, except for a span that got its own when its request began."""

    def __init__(self) -> None:
        self._planned: tuple[int, int] | None = None

    def plan(self, trace_id: int, span_id: int) -> None:
        """Gives these to the next span."""
        self._planned = trace_id, span_id

    def generate_trace_id(self) -> int:
        return self._planned[0] if self._planned else super().generate_trace_id()

    def generate_span_id(self) -> int:
        if self._planned is None:
            return super().generate_span_id()
        (_, span_id), self._planned = self._planned, None
        return span_id


@dataclass(slots=True)
class TraceContext:
    """One request's place in a trace, from its head to its last byte."""

    trace_id: int
    span_id: int
    parent: Context  # with the caller's span, unless this is the root
    is_kept: bool  # by the sampler, or because the request has been slow
    slow_gaps: list[Gap] = field(default_factory=list)  # the longest, longest first

    def link(self) -> Link:
        """Returns a link to the request's span, which may not have been made yet."""
        sampled = TraceFlags(TraceFlags.SAMPLED)
        return Link(SpanContext(self.trace_id, self.span_id, is_remote=False, trace_flags=sampled))


class Part(msgspec.Struct, frozen=True, gc=False):
    """A child span to be made."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = {}


class Spans:
    """Makes the spans and gives them to the tracer's provider."""

    def __init__(self, tracer: Tracer, ids: PlannedIds, offset_ns: int, attributes: Mapping[str, Value]) -> None:
        """`ids` are the provider's, `offset_ns` is from the monotonic clock to Unix time.

        `attributes` are what the spans of all requests share.
        """
        self._tracer = tracer
        self._ids = ids
        self._offset_ns = offset_ns
        self._attributes = attributes

    def of_request(self, timeline: RequestTimeline, context: TraceContext) -> None:
        """Makes the span of a request that has ended, and its children."""
        self._ids.plan(context.trace_id, context.span_id)
        attributes = {**self._attributes, **_request_attributes(timeline)}
        part = Part(request_name(timeline, self._attributes), timeline.recv_ns, timeline.end_ns, attributes)
        whole = self._begin(part, context.parent, kind=SpanKind.SERVER)
        for name, at_ns, details in (*_preemptions(timeline), *map(_slow_gap, context.slow_gaps)):
            whole.add_event(name, details, at_ns + self._offset_ns)
        if timeline.has_failed:
            whole.set_status(StatusCode.ERROR, timeline.error_code)
        self._end_with(whole, part, request_parts(timeline))

    def of_step(self, record: StepRecord, links: Sequence[Link], *, is_slow: bool) -> None:
        """Makes the span of a step, a trace of its own, and its phases; links lead to the requests that it advanced."""
        attributes: dict[str, Value] = {f"roseinfer.{name}": getattr(record, name) for name in _STEP_FACTS}
        attributes |= {"roseinfer.kind": record.kind, "roseinfer.is_slow": is_slow}
        attributes |= {"roseinfer.blocked_by": record.blocked_by.value} if record.blocked_by else {}
        part = Part("roseinfer.step", record.start_ns, record.end_ns, attributes)
        made = {"": (self._begin(part, Context(), links), part)}
        for name, start_ns, end_ns in intervals.step_phases(record):
            if end_ns > start_ns:
                facts: dict[str, Value] = {"roseinfer.h2d_bytes": record.h2d_bytes} if name == "h2d" else {}
                phase = Part(f"roseinfer.{name}", start_ns, end_ns, facts)
                parent, _ = made.get(_PARENT_PHASES.get(name, ""), made[""])
                made[name] = self._begin(phase, set_span_in_context(parent, Context())), phase
        for span, each in made.values():
            span.end(each.end_ns + self._offset_ns)

    def of_startup(self, entered_ns: tuple[int, int, int], stages_s: Mapping[str, float]) -> None:
        """Makes the spans of the start-up; `entered_ns`: when the server began, began to load, and was ready.

        The engine's stages are laid one after the other from where the loading began, which was heard of later.
        """
        start_ns, begin_ns, ready_ns = entered_ns
        begin_ns = min(begin_ns, ready_ns - round(sum(stages_s.values()) * NS_PER_S))
        whole, parts = Part("roseinfer.startup", start_ns, ready_ns), []
        for stage, seconds in stages_s.items():
            end_ns = begin_ns + round(seconds * NS_PER_S)
            parts.append(Part(f"roseinfer.startup.{stage}", begin_ns, end_ns))
            begin_ns = end_ns
        self._end_with(self._begin(whole, Context()), whole, parts)

    def _begin(
        self, part: Part, parent: Context, links: Sequence[Link] = (), kind: SpanKind = SpanKind.INTERNAL
    ) -> Span:
        start_ns = part.start_ns + self._offset_ns
        return self._tracer.start_span(part.name, parent, kind, part.attributes, links, start_ns)

    def _end_with(self, whole: Span, part: Part, children: Iterator[Part] | Sequence[Part]) -> None:
        """Ends the whole, and before it its children, which it has for itself."""
        within = set_span_in_context(whole, Context())
        for child in children:
            self._begin(child, within).end(child.end_ns + self._offset_ns)
        whole.end(part.end_ns + self._offset_ns)


# --- requests ---------------------------------------------------------------------------------------------------------

_STAGE_SPANS = {"submit_lag": "submit", "queue_wait": "queue"}
_Event = tuple[str, int, dict[str, Value]]  # its name, when, and more


def request_name(timeline: RequestTimeline, attributes: Mapping[str, Value]) -> str:
    """Returns the name of the request's span."""
    return f"{timeline.api.operation} {attributes[semconv.GEN_AI_REQUEST_MODEL]}"


def request_parts(timeline: RequestTimeline) -> Iterator[Part]:
    """Yields what a request went through, part after part, without a hole from its head to its last write.

    The part in which it ended goes to its end, and tokens that the engine made later are in none. `write` is from the
    last token to the last write.
    """
    writes, end_ns = timeline.write_ns, timeline.end_ns
    tokens = timeline.token_ns[: bisect_right(timeline.token_ns, end_ns)]
    for name, start_ns, stop_ns in intervals.stages(replace(timeline, token_ns=tokens), end_ns):
        if name != "decode" or len(tokens) > 1:
            yield Part(f"roseinfer.{_STAGE_SPANS.get(name, name)}", start_ns, stop_ns)
    if tokens:
        stop_ns = writes[-1] if writes and writes[-1] >= tokens[-1] else end_ns
        if stop_ns > tokens[-1]:
            yield Part("roseinfer.write", tokens[-1], stop_ns)


def _request_attributes(timeline: RequestTimeline) -> dict[str, Value]:
    """Returns what is known of the request."""
    gaps = [later - earlier for earlier, later in pairwise(timeline.token_ns)]
    first_token_ns = intervals.time_to_first_token_ns(timeline)
    per_token_ns = intervals.time_per_output_token_ns(timeline)
    reason = timeline.finish_reason
    known: dict[str, Value | None] = {
        semconv.GEN_AI_OPERATION_NAME: timeline.api.operation,
        semconv.GEN_AI_REQUEST_MAX_TOKENS: timeline.max_tokens or None,
        semconv.GEN_AI_REQUEST_TEMPERATURE: timeline.temperature,
        semconv.GEN_AI_REQUEST_TOP_P: timeline.top_p,
        semconv.GEN_AI_REQUEST_STREAM: timeline.is_streamed if timeline.tokenized_ns else None,
        semconv.GEN_AI_USAGE_INPUT_TOKENS: timeline.num_prompt_tokens if timeline.tokenized_ns else None,
        semconv.GEN_AI_USAGE_OUTPUT_TOKENS: len(timeline.token_ns) if timeline.tokenized_ns else None,
        semconv.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: timeline.num_cached_tokens if timeline.scheduled_ns else None,
        semconv.GEN_AI_RESPONSE_FINISH_REASONS: None if reason is None else [reason.value],
        semconv.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: None if first_token_ns is None else first_token_ns / NS_PER_S,
        semconv.ERROR_TYPE: timeline.error_code or None,
        "roseinfer.request_id": timeline.request_id,
        "roseinfer.api": timeline.api.value,
        "roseinfer.num_preemptions": timeline.num_preemptions,
        "roseinfer.client_disconnected": timeline.client_disconnected,
        "roseinfer.time_per_output_token_s": None if per_token_ns is None else per_token_ns / NS_PER_S,
        "roseinfer.longest_inter_token_latency_s": max(gaps) / NS_PER_S if gaps else None,
    }
    return {name: value for name, value in known.items() if value is not None}


def _preemptions(timeline: RequestTimeline) -> Iterator[_Event]:
    if timeline.preempted_ns:
        yield "roseinfer.preempted", timeline.preempted_ns, {}
    if timeline.resumed_ns:
        yield "roseinfer.resumed", timeline.resumed_ns, {}


def _slow_gap(gap: Gap) -> _Event:
    attributes: dict[str, Value] = {
        "roseinfer.cause": gap.cause.value,
        "roseinfer.duration_s": gap.duration_ns / NS_PER_S,
        "roseinfer.index": gap.index,
        "roseinfer.step_id": gap.step_id,
    }
    return "roseinfer.slow_gap", gap.end_ns, attributes


# --- steps ------------------------------------------------------------------------------------------------------------

_PARENT_PHASES = {**dict.fromkeys(("capture", "stage", "forward", "sample"), "launch"), "h2d": "stage"}
_STEP_FACTS = (
    *("step_id", "num_decode_seqs", "num_prefill_seqs", "num_prefill_tokens", "num_generated_tokens"),
    *("num_context_tokens", "num_preemptions", "num_not_selected", "num_running", "num_waiting", "gc_ns"),
    *("outbox_depth", "outbox_wait_ns", "h2d_bytes", "graph_rows", "pipeline_depth", "is_profiled"),
)
