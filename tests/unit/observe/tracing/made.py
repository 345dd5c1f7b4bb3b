"""Spans as the SDK has them, made without a collector; their stamps are those of the facts."""

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanContext

from roseinfer.observe.tracing import semconv
from roseinfer.observe.tracing.spans import PlannedIds, Spans

SHARED = {semconv.GEN_AI_REQUEST_MODEL: "tiny", semconv.GEN_AI_PROVIDER_NAME: "roseinfer"}


class Made:
    """What `spans` makes."""

    def __init__(self) -> None:
        self.ids = PlannedIds()
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(ALWAYS_ON, shutdown_on_exit=False, id_generator=self.ids)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.spans = Spans(provider.get_tracer("test"), self.ids, 0, SHARED)

    def forget(self) -> None:
        """Of those made so far."""
        self._exporter.clear()

    def all(self) -> list[ReadableSpan]:
        """Those without a parent here first, the others as they ended."""
        found: Sequence[ReadableSpan] = self._exporter.get_finished_spans()
        return sorted(found, key=lambda span: span.parent is not None and not span.parent.is_remote)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all() if span.name == name]


def own(span: ReadableSpan) -> SpanContext:
    context: SpanContext | None = span.context
    assert context is not None
    return context


def parent_id(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def told(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})
