"""Passes spans on to the SDK's batches and counts what is lost on the way, which the SDK does not tell.

A trace that finds no room is dropped whole, and a batch that an exporter gives up is lost.
"""

import logging
from collections.abc import Callable, Sequence

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from roseinfer.errors import ConfigError
from roseinfer.observe import otel
from roseinfer.observe.tracing.spans import MAX_SPANS

logger = logging.getLogger(__name__)


class Outlet(SpanExporter):
    """One exporter of the SDK, called in the thread of its batches."""

    def __init__(self, exporter: SpanExporter, failures: otel.Failures, on_lost: Callable[[int], None]) -> None:
        """`on_lost` is called with the id of each trace that was in a batch that is lost."""
        self._exporter = exporter
        self._failures = failures
        self._on_lost = on_lost
        self._is_closed = False
        self.num_taken = 0  # out of the queue
        self.num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            if not self._is_closed:
                result = self._exporter.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self.num_lost += len(spans)
                for trace_id in {span.context.trace_id for span in spans if span.context}:
                    self._on_lost(trace_id)
            self._failures.note(is_taken=result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._exporter.shutdown()


class SpanExport(SpanProcessor):
    """Stands before the SDK's queues, one for each outlet. All but the outlets belongs to the event loop."""

    def __init__(
        self,
        provider: TracerProvider,
        exporters: Sequence[SpanExporter],
        max_queued: int,
        max_batch: int,
        on_lost: Callable[[int], None],
    ) -> None:
        """`on_lost` is as for an outlet. Raises ConfigError for limits that exclude each other."""
        if max_queued < MAX_SPANS:
            raise ConfigError(f"{max_queued} is less than {MAX_SPANS}, a trace", param="OTEL_BSP_MAX_QUEUE_SIZE")
        self._provider = provider
        self._max_queued = max_queued
        self._num_put = 0
        self._num_refused = 0
        self._is_open = True
        self._failures = otel.Failures("spans")
        self._outlets = [Outlet(exporter, self._failures, on_lost) for exporter in exporters]
        try:
            self._batches = [
                BatchSpanProcessor(outlet, max_queue_size=max_queued, max_export_batch_size=max_batch)
                for outlet in self._outlets
            ]
        except ValueError as error:
            raise ConfigError(str(error), param="OTEL_BSP_MAX_EXPORT_BATCH_SIZE") from None
        provider.add_span_processor(self)

    @property
    def num_lost(self) -> int:
        """Spans that found no room or could not be delivered, so far."""
        return self._num_refused + sum(outlet.num_lost for outlet in self._outlets)

    def admit(self) -> bool:
        """Decides whether the spans that end until the next call are queued, and returns it; else they are dropped."""
        num_queued = self._num_put - min(outlet.num_taken for outlet in self._outlets)
        self._is_open = num_queued + MAX_SPANS <= self._max_queued
        return self._is_open

    def on_end(self, span: ReadableSpan) -> None:
        if not self._is_open:
            self._num_refused += 1
            return
        self._num_put += 1
        for batches in self._batches:
            batches.on_end(span)

    def shutdown(self) -> None:
        for batches in self._batches:
            batches.shutdown()  # type: ignore[no-untyped-call]

    def close(self, timeout_s: float) -> None:
        """Delivers what is queued, if that takes no longer than the timeout."""
        otel.close_within(timeout_s, self._provider.shutdown, self._outlets)
        undelivered = sum(self._num_put - outlet.num_taken for outlet in self._outlets)
        if undelivered or self.num_lost:
            logger.info("spans were lost", extra={"undelivered": undelivered, "dropped": self.num_lost})
        self._failures.close()
