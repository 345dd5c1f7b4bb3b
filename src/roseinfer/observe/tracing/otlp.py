"""Encodes spans as an OTLP request, in OpenTelemetry's own messages.

OpenTelemetry's SDK does not fill them: it makes spans while code runs, and its exporter takes addresses and headers
from the environment.
"""

from collections.abc import Iterable, Mapping, Sequence

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from roseinfer.observe.recorder.recording import ClockPair
from roseinfer.observe.tracing.spans import Span, SpanEvent, Value

SCOPE = "roseinfer"
_FLAG_SAMPLED = 0x01
_HAS_IS_REMOTE, _IS_REMOTE = (
    trace_pb2.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK,
    trace_pb2.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK,
)


class Encoder:
    """Encodes spans of one process, whose monotonic stamps `clock` places on the calendar."""

    def __init__(self, resource: Mapping[str, Value], version: str, clock: ClockPair) -> None:
        self._resource = resource_pb2.Resource(attributes=_attributes(resource))
        self._scope = common_pb2.InstrumentationScope(name=SCOPE, version=version)
        self._offset_ns = clock.unix_ns - clock.monotonic_ns

    def encode(self, spans: Iterable[Span]) -> bytes:
        """Returns an ExportTraceServiceRequest. Several may be joined: protobuf reads one request with all spans."""
        scope_spans = trace_pb2.ScopeSpans(scope=self._scope, spans=map(self._span, spans))
        resource_spans = trace_pb2.ResourceSpans(resource=self._resource, scope_spans=[scope_spans])
        request = trace_service_pb2.ExportTraceServiceRequest(resource_spans=[resource_spans])
        return bytes(request.SerializeToString())

    def _span(self, span: Span) -> trace_pb2.Span:
        message = trace_pb2.Span(
            name=span.name,
            trace_id=span.trace_id.to_bytes(16, "big"),
            span_id=span.span_id.to_bytes(8, "big"),
            flags=_FLAG_SAMPLED | _HAS_IS_REMOTE | (_IS_REMOTE if span.has_remote_parent else 0),
            kind=trace_pb2.Span.SPAN_KIND_SERVER if span.is_server else trace_pb2.Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=span.start_ns + self._offset_ns,
            end_time_unix_nano=span.end_ns + self._offset_ns,
            attributes=_attributes(span.attributes),
            events=map(self._event, span.events),
            links=map(_link, span.links),
        )
        if span.parent_span_id:
            message.parent_span_id = span.parent_span_id.to_bytes(8, "big")
        if span.error is not None:
            message.status.code = trace_pb2.Status.STATUS_CODE_ERROR
            message.status.message = span.error
        return message

    def _event(self, event: SpanEvent) -> trace_pb2.Span.Event:
        return trace_pb2.Span.Event(
            name=event.name,
            time_unix_nano=event.at_ns + self._offset_ns,
            attributes=_attributes(event.attributes),
        )


def _link(link: tuple[int, int]) -> trace_pb2.Span.Link:
    trace_id, span_id = link
    return trace_pb2.Span.Link(trace_id=trace_id.to_bytes(16, "big"), span_id=span_id.to_bytes(8, "big"))


def _attributes(attributes: Mapping[str, Value]) -> list[common_pb2.KeyValue]:
    return [common_pb2.KeyValue(key=name, value=_value(value)) for name, value in attributes.items()]


def _value(value: Value) -> common_pb2.AnyValue:
    match value:
        case bool():
            return common_pb2.AnyValue(bool_value=value)
        case int():
            return common_pb2.AnyValue(int_value=value)
        case float():
            return common_pb2.AnyValue(double_value=value)
        case str():
            return common_pb2.AnyValue(string_value=value)
        case Sequence():
            return common_pb2.AnyValue(array_value=common_pb2.ArrayValue(values=map(_value, value)))


def num_rejected(answer: bytes) -> int:
    """Returns the spans that a collector says it did not take, in the body of an answer with status 200."""
    try:
        response = trace_service_pb2.ExportTraceServiceResponse.FromString(answer)
    except DecodeError:
        return 0  # in JSON, or not a collector's
    return int(response.partial_success.rejected_spans)
