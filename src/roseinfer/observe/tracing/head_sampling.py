"""Gives a request its place in a trace when it arrives, by its headers and the SDK's sampler.

The headers are those of W3C Trace Context and W3C Baggage, as OTEL_PROPAGATORS chooses among them.
"""

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.trace.sampling import Decision, Sampler
from opentelemetry.trace import SpanKind, format_trace_id, get_current_span

from roseinfer.errors import ConfigError
from roseinfer.observe.otel import Environment, given, make_component
from roseinfer.observe.tracing.spans import PlannedIds, TraceContext, Value, request_name
from roseinfer.records import RequestTimeline

_HEADERS = ("traceparent", "tracestate", "baggage")  # that a timeline keeps
_BY_RATIO = ("traceidratio", "parentbased_traceidratio")


def make_sampler(environment: Environment, ratio: float) -> Sampler:
    """Returns what OTEL_TRACES_SAMPLER and _ARG name; without, the caller decides, else chance with this ratio."""
    _, name = given(environment, "OTEL_TRACES_SAMPLER")
    _, argument = given(environment, "OTEL_TRACES_SAMPLER_ARG")
    default = "1" if name else str(ratio)  # that of the standard belongs to the samplers of the standard
    name = name.lower() or "parentbased_traceidratio"
    value: str | float | None = argument or None
    if name in _BY_RATIO:
        try:
            value = float(argument or default)
        except ValueError:
            raise ConfigError(f"{argument!r} is no number", param="OTEL_TRACES_SAMPLER_ARG") from None
        if not 0 <= value <= 1:
            raise ConfigError(f"{argument!r} is not between 0 and 1", param="OTEL_TRACES_SAMPLER_ARG")
    sampler: Sampler = make_component("opentelemetry_traces_sampler", name, "OTEL_TRACES_SAMPLER", value)
    return sampler


def make_propagator(environment: Environment) -> TextMapPropagator:
    """Returns the propagators that OTEL_PROPAGATORS names. Raises ConfigError for one whose headers are not kept."""
    variable, names = given(environment, "OTEL_PROPAGATORS")
    found = [name.strip() for name in (names or "tracecontext,baggage").split(",")]
    found = [name for name in found if name not in {"", "none"}]
    group = "opentelemetry_propagator"
    propagator = CompositePropagator([make_component(group, name, variable) for name in found])
    if unknown := propagator.fields - set(_HEADERS):
        raise ConfigError(f"{names!r} reads {', '.join(sorted(unknown))}, which is not kept", param=variable)
    return propagator


class HeadSampler:
    """Begins the traces of requests."""

    def __init__(
        self, sampler: Sampler, propagator: TextMapPropagator, ids: PlannedIds, attributes: Mapping[str, Value]
    ) -> None:
        """`attributes` are what the spans of all requests share, which a sampler may look at."""
        self._sampler = sampler
        self._propagator = propagator
        self._ids = ids
        self._attributes = attributes

    def begin(self, timeline: RequestTimeline) -> TraceContext:
        """Returns the context of a request that has just begun, and writes its trace id into the timeline."""
        headers = {name: value for name in _HEADERS if (value := getattr(timeline, name))}
        parent = self._propagator.extract(headers, Context()) if headers else Context()
        caller = get_current_span(parent).get_span_context()
        if caller.is_valid:
            trace_id = caller.trace_id
        else:
            trace_id = int(timeline.trace_id, 16) if timeline.trace_id else self._ids.generate_trace_id()
        name = request_name(timeline, self._attributes)
        result = self._sampler.should_sample(parent, trace_id, name, SpanKind.SERVER, self._attributes)
        timeline.trace_id = format_trace_id(trace_id)
        return TraceContext(
            trace_id, self._ids.generate_span_id(), parent, result.decision is Decision.RECORD_AND_SAMPLE
        )
