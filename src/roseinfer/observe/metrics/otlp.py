"""Exports the metrics of the catalogue over OTLP, where OTEL_METRICS_EXPORTER asks for it.

The SDK has no instrument for a histogram that was counted elsewhere, and ours are; so the data points are made here,
all of one moment as a scrape's are, and its exporters send them.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Buckets,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Gauge,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as ExplicitHistogram
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from roseinfer.errors import ConfigError
from roseinfer.observe import otel
from roseinfer.observe.metrics.catalogue import START_TIME, VLLM_NAMES
from roseinfer.observe.metrics.histogram import SCHEMA, Histogram
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.observe.metrics.protobuf import Exemplars, Values
from roseinfer.observe.metrics.row import Row

_TEMPORALITY = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
_AGGREGATION = "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"
_AGGREGATIONS = ("base2_exponential_bucket_histogram", "explicit_bucket_histogram")  # the default is the first
_EXEMPLAR_FILTER = "OTEL_METRICS_EXEMPLAR_FILTER"
_EXEMPLAR_FILTERS = ("trace_based", "always_off")  # likewise
_DEFAULT_INTERVAL_MS, _DEFAULT_TIMEOUT_MS = "60000", "30000"  # as in the SDK
_UNITS = {"seconds": "s", "ratio": "1", "": ""}
_CUMULATIVE = AggregationTemporality.CUMULATIVE
_UNKNOWN: Any = None  # the least and the greatest value, which the protocol lets one leave out


_BEGIN_ANEW = frozenset({"roseinfer_gap_seconds_total", "roseinfer_slow_gaps_total"})
_Period = tuple[int, int]
"""When the counting of a point began, and its moment, in Unix nanoseconds."""


def _begins_anew(row: Row) -> bool:
    """Returns whether a telemetry process that is started again counts from 0: the front end has no count of it."""
    return row.kind == "histogram" or row.name in _BEGIN_ANEW


class Points:
    """Makes data points of what metrics hold."""

    def __init__(self, resource: Resource, version: str, model_name: str, *, is_exponential: bool) -> None:
        """`is_exponential`: histograms have exponential buckets, else those by bounds."""
        self._resource = resource
        self._scope = InstrumentationScope("roseinfer", version)
        self._model_name = model_name
        self._is_exponential = is_exponential
        self._begin_ns = time.time_ns()

    def of(self, snapshot: Iterable[tuple[Row, Values, Exemplars]]) -> MetricsData:
        """Returns what an exporter takes. The rows under vLLM's names are left out: pickers scrape them."""
        now_ns = time.time_ns()
        rows = [each for each in snapshot if each[0].name not in VLLM_NAMES]
        (server_s,) = (values[()] for row, values, _ in rows if row.name == START_TIME)
        assert isinstance(server_s, float)
        server_ns = int(server_s * 1e9)
        metrics = [
            self._metric(row, values, exemplars, (self._begin_ns if _begins_anew(row) else server_ns, now_ns))
            for row, values, exemplars in rows
        ]
        scoped = ScopeMetrics(self._scope, metrics, schema_url="")
        return MetricsData([ResourceMetrics(self._resource, [scoped], schema_url="")])

    def _metric(self, row: Row, values: Values, exemplars: Exemplars, period: _Period) -> Metric:
        constant = {"model_name": self._model_name} if row.is_per_model else {}
        data: Any
        if row.kind == "info":
            labels = {name: str(value) for (name,), value in values.items()}
            data = Gauge([self._number({**constant, **labels}, 1, period)] if values else [])
            return Metric(row.name, row.help, _UNITS[""], data)
        points: list[Any] = []
        for child, value in values.items():
            labels = constant | dict(zip([label.name for label in row.labels], child, strict=True))
            if isinstance(value, Histogram):
                points.append(self._histogram(labels, value, exemplars.get(child, ()), period))
            else:
                assert isinstance(value, int | float)
                points.append(self._number(labels, value, period))
        if row.kind == "histogram":
            data = (ExponentialHistogram if self._is_exponential else ExplicitHistogram)(points, _CUMULATIVE)
        else:
            data = Gauge(points) if row.kind == "gauge" else Sum(points, _CUMULATIVE, is_monotonic=True)
        return Metric(row.name, row.help, _UNITS.get(row.unit, f"{{{row.unit}}}"), data)

    def _number(self, labels: Mapping[str, str], value: float, period: _Period) -> NumberDataPoint:
        return NumberDataPoint(labels, *period, value)

    def _histogram(
        self, labels: Mapping[str, str], values: Histogram, exemplars: Sequence[Any | None], period: _Period
    ) -> HistogramDataPoint | ExponentialHistogramDataPoint:
        same: dict[str, Any] = {
            "attributes": labels,
            "start_time_unix_nano": period[0],
            "time_unix_nano": period[1],
            "count": sum(values.counts),
            "sum": values.total,
            "min": _UNKNOWN,
            "max": _UNKNOWN,
            "exemplars": _exemplars(exemplars),
        }
        if not self._is_exponential:
            return HistogramDataPoint(bucket_counts=values.counts, explicit_bounds=values.bounds, **same)
        # OpenTelemetry numbers a bucket by its lower bound, we and Prometheus by its upper one.
        first = min(values.exponents, default=1)
        counts = [values.exponents.get(index, 0) for index in range(first, max(values.exponents, default=0) + 1)]
        same |= {"positive": Buckets(first - 1, counts), "negative": Buckets(0, [])}
        return ExponentialHistogramDataPoint(scale=SCHEMA, zero_count=values.num_zeros, flags=0, **same)


def _exemplars(found: Sequence[Any | None]) -> list[Exemplar]:
    made = []
    for exemplar in found:
        if exemplar is not None:
            labels = dict(exemplar.labels)
            trace_id, span_id = (int(labels.pop(name), 16) for name in ("trace_id", "span_id"))
            made.append(Exemplar(labels, exemplar.value, int(exemplar.timestamp * 1e9), span_id, trace_id))
    return made


class MetricsExport:
    """The thread that exports, every so often and a last time when it is closed."""

    def __init__(
        self,
        exporters: Sequence[MetricExporter],
        collect: Callable[[], MetricsData],
        interval_s: float,
        timeout_ms: float,
    ) -> None:
        self._exporters = exporters
        self._collect = collect
        self._interval_s = interval_s
        self._timeout_ms = timeout_ms
        self._failures = otel.Failures("metrics")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="roseinfer-otel-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Exports a last time, as far as the flush timeout allows."""
        otel.close_within(otel.FLUSH_TIMEOUT_S, self._shut_down, self._exporters)
        self._failures.close()

    def _shut_down(self) -> None:
        self._closing.set()
        self._thread.join()
        for exporter in self._exporters:
            exporter.shutdown()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._export()
        self._export()

    def _export(self) -> None:
        data = self._collect()
        for exporter in self._exporters:
            result = exporter.export(data, timeout_millis=self._timeout_ms)
            self._failures.note(is_taken=result is MetricExportResult.SUCCESS)


def make_metrics_export(
    metrics: Metrics,
    model_name: str,
    version: str,
    exporter_names: Iterable[str],
    environment: otel.Environment,
    server_pid: int | None,
) -> MetricsExport:
    """Returns the running export to what `otel.exporter_names` gives. Raises ConfigError.

    `server_pid` is as for `otel.make_resource`.
    """
    _, temporality = otel.given(environment, _TEMPORALITY)
    if temporality.lower() not in {"", "cumulative"}:
        raise ConfigError(f"{temporality!r} is not cumulative, as all counts here are", param=_TEMPORALITY)
    _, aggregation = otel.given(environment, _AGGREGATION)
    aggregation = aggregation.lower() or _AGGREGATIONS[0]
    if aggregation not in _AGGREGATIONS:
        raise ConfigError(f"{aggregation!r} is none of {', '.join(_AGGREGATIONS)}", param=_AGGREGATION)
    _, exemplar_filter = otel.given(environment, _EXEMPLAR_FILTER)
    exemplar_filter = exemplar_filter.lower() or _EXEMPLAR_FILTERS[0]
    if exemplar_filter not in _EXEMPLAR_FILTERS:
        raise ConfigError(f"{exemplar_filter!r} is none of {', '.join(_EXEMPLAR_FILTERS)}", param=_EXEMPLAR_FILTER)
    exporters = otel.make_exporters("metrics", exporter_names, None, environment)
    is_exponential = aggregation == _AGGREGATIONS[0]
    resource = otel.make_resource(version, server_pid)
    points = Points(resource, version, model_name, is_exponential=is_exponential)
    _, interval_ms = otel.given(environment, "OTEL_METRIC_EXPORT_INTERVAL")
    _, timeout_ms = otel.given(environment, "OTEL_METRIC_EXPORT_TIMEOUT")
    has_exemplars = exemplar_filter == _EXEMPLAR_FILTERS[0]

    def collect() -> MetricsData:
        snapshot = metrics.snapshot()
        return points.of(snapshot if has_exemplars else ((row, values, {}) for row, values, _ in snapshot))

    return MetricsExport(
        exporters,
        collect,
        float(interval_ms or _DEFAULT_INTERVAL_MS) / 1e3,
        float(timeout_ms or _DEFAULT_TIMEOUT_MS),
    )
