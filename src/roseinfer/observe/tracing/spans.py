"""Makes spans of requests, steps and the start-up: plain structs with the very stamps of the facts.

Spans are made when everything has happened, so a start and an end are given and never taken. All stamps are monotonic
nanoseconds; `otlp.py` places them on the calendar.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from roseinfer.observe.gaps import intervals
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.tracing import semconv
from roseinfer.records import FinishReason, RequestTimeline, StepRecord

NS_PER_S = 1e9
MAX_GAP_EVENTS = 3  # of each request
MAX_LINKS = 128  # what OpenTelemetry allows a span by default

Value = str | bool | int | float | Sequence[str]
NewId = Callable[[], int]


class SpanEvent(msgspec.Struct, frozen=True):
    """Something that happened within a span."""

    name: str
    at_ns: int
    attributes: Mapping[str, Value] = {}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One span. `parent_span_id` 0: it has none. A link is a trace id and a span id."""

    name: str
    trace_id: int
    span_id: int
    parent_span_id: int = 0
    has_remote_parent: bool = False
    is_server: bool = False
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = {}
    events: Sequence[SpanEvent] = ()
    links: Sequence[tuple[int, int]] = ()
    error: str | None = None  # not None: the span's status is error, with this description


@dataclass(slots=True)
class TraceContext:
    """One request's place in a trace, from its first byte to its last."""

    trace_id: int
    span_id: int
    parent_span_id: int  # 0: it is the root
    is_kept: bool  # by chance, or because the caller keeps it, or because it has been slow
    slow_gaps: list[Gap] = field(default_factory=list)  # the longest, longest first


class Part(msgspec.Struct, frozen=True, gc=False):
    """A child span to be made."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = {}


# --- requests ---------------------------------------------------------------------------------------------------------

_STAGE_SPANS = {"submit_lag": "submit", "queue_wait": "queue"}


def request_parts(timeline: RequestTimeline) -> Iterator[Part]:
    """Yields what a request went through, part after part, without a hole from its first byte to its last write.

    The part in which it ended goes to its end. `write` is from the last token to the last write.
    """
    tokens, writes, end_ns = timeline.token_ns, timeline.write_ns, timeline.end_ns
    for name, start_ns, stop_ns in intervals.stages(timeline, end_ns):
        if name != "decode" or len(tokens) > 1:
            yield Part(f"roseinfer.{_STAGE_SPANS.get(name, name)}", start_ns, stop_ns)
    if tokens:
        stop_ns = writes[-1] if writes and writes[-1] >= tokens[-1] else end_ns
        if stop_ns > tokens[-1]:
            yield Part("roseinfer.write", tokens[-1], stop_ns)


def request_spans(
    timeline: RequestTimeline, context: TraceContext, attributes: Mapping[str, Value], new_id: NewId
) -> list[Span]:
    """Returns the span of a request that has ended, and its children. `attributes` are what all requests share."""
    is_fault = timeline.finish_reason in {FinishReason.ERROR, FinishReason.TIMEOUT}
    operation, model = timeline.api.operation, attributes[semconv.GEN_AI_REQUEST_MODEL]
    whole = Span(
        name=f"{operation} {model}",
        trace_id=context.trace_id,
        span_id=context.span_id,
        parent_span_id=context.parent_span_id,
        has_remote_parent=bool(context.parent_span_id),
        is_server=True,
        start_ns=timeline.recv_ns,
        end_ns=timeline.end_ns,
        attributes={**attributes, **_request_attributes(timeline)},
        events=[*_preemption_events(timeline), *map(_gap_event, context.slow_gaps)],
        error=timeline.error_code if is_fault else None,
    )
    return [whole, *_children(whole, request_parts(timeline), new_id)]


def _children(parent: Span, parts: Iterator[Part] | Sequence[Part], new_id: NewId) -> Iterator[Span]:
    for part in parts:
        yield Span(
            name=part.name,
            trace_id=parent.trace_id,
            span_id=new_id(),
            parent_span_id=parent.span_id,
            start_ns=part.start_ns,
            end_ns=part.end_ns,
            attributes=part.attributes,
        )


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


def _preemption_events(timeline: RequestTimeline) -> Iterator[SpanEvent]:
    if timeline.preempted_ns:
        yield SpanEvent("roseinfer.preempted", timeline.preempted_ns)
    if timeline.resumed_ns:
        yield SpanEvent("roseinfer.resumed", timeline.resumed_ns)


def _gap_event(gap: Gap) -> SpanEvent:
    attributes: dict[str, Value] = {
        "roseinfer.cause": gap.cause.value,
        "roseinfer.duration_s": gap.duration_ns / NS_PER_S,
        "roseinfer.index": gap.index,
        "roseinfer.step_id": gap.step_id,
    }
    return SpanEvent("roseinfer.slow_gap", gap.end_ns, attributes)


# --- steps and the start-up -------------------------------------------------------------------------------------------

_PARENT_PHASES = {**dict.fromkeys(("capture", "stage", "forward", "sample"), "launch"), "h2d": "stage"}
_STEP_FACTS = (
    *("step_id", "num_decode_seqs", "num_prefill_seqs", "num_prefill_tokens", "num_generated_tokens"),
    *("num_context_tokens", "num_preemptions", "num_not_selected", "num_running", "num_waiting", "gc_ns"),
    *("outbox_depth", "outbox_wait_ns", "h2d_bytes", "graph_rows", "pipeline_depth", "is_profiled"),
)


def step_spans(
    record: StepRecord, trace_id: int, links: Sequence[tuple[int, int]], is_slow: bool, new_id: NewId
) -> list[Span]:
    """Returns the span of a step, a trace of its own, and its phases; links lead to the requests that it advanced."""
    attributes: dict[str, Value] = {f"roseinfer.{name}": getattr(record, name) for name in _STEP_FACTS}
    attributes |= {"roseinfer.kind": record.kind, "roseinfer.is_slow": is_slow}
    attributes |= {"roseinfer.blocked_by": record.blocked_by.value} if record.blocked_by else {}
    whole = Span(
        name="roseinfer.step",
        trace_id=trace_id,
        span_id=new_id(),
        start_ns=record.start_ns,
        end_ns=record.end_ns,
        attributes=attributes,
        links=links[:MAX_LINKS],
    )
    made = {"": whole}
    for name, start_ns, end_ns in intervals.step_phases(record):
        if end_ns > start_ns:
            facts: dict[str, Value] = {"roseinfer.h2d_bytes": record.h2d_bytes} if name == "h2d" else {}
            parent = made.get(_PARENT_PHASES.get(name, ""), whole)
            [made[name]] = _children(parent, [Part(f"roseinfer.{name}", start_ns, end_ns, facts)], new_id)
    return list(made.values())


def startup_spans(
    trace_id: int, entered_ns: tuple[int, int, int], stages_s: Mapping[str, float], new_id: NewId
) -> list[Span]:
    """Returns the spans of the start-up; `entered_ns`: when the server began, began to load, and was ready.

    The engine's stages are laid one after the other from where the loading began.
    """
    start_ns, loading_ns, ready_ns = entered_ns
    whole = Span(name="roseinfer.startup", trace_id=trace_id, span_id=new_id(), start_ns=start_ns, end_ns=ready_ns)
    parts, begin_ns = [], loading_ns
    for stage, seconds in stages_s.items():
        end_ns = begin_ns + round(seconds * NS_PER_S)
        parts.append(Part(f"roseinfer.startup.{stage}", begin_ns, end_ns))
        begin_ns = end_ns
    return [whole, *_children(whole, parts, new_id)]
