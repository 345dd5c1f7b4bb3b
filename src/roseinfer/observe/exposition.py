"""Rows and their values in, prometheus_client families out; knows nothing of where the values came from."""

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from roseinfer.observe.histogram import Histogram
from roseinfer.observe.series import Row

Values = Mapping[str, float | str | Histogram]


def family(row: Row, values: Values, model_name: str) -> Metric:
    """The family of one row. `values` are by label value, or, for an info, the labels of its one series."""
    labels = {"model_name": model_name} if row.is_per_model else {}
    constant = list(labels.values())
    names = [*labels, row.label.name] if row.label else list(labels)
    metric = _empty(row, names)
    if isinstance(metric, InfoMetricFamily):
        if values:
            metric.add_metric(constant, {name: str(value) for name, value in values.items()})
        return metric
    for child, value in values.items():
        series = [*constant, child] if row.label else constant
        if isinstance(metric, HistogramMetricFamily):
            assert isinstance(value, Histogram)
            metric.add_metric(series, _buckets(value), value.total)
        else:
            assert isinstance(value, int | float)
            metric.add_metric(series, value)
    return metric


def _empty(
    row: Row, labels: list[str]
) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | InfoMetricFamily:
    # OpenMetrics demands that a family's name ends in the unit it states.
    unit = row.unit if row.name.removesuffix("_total").endswith(f"_{row.unit}") else ""
    match row.kind:
        case "counter":
            return CounterMetricFamily(row.name, row.help, labels=labels, unit=unit)
        case "gauge":
            return GaugeMetricFamily(row.name, row.help, labels=labels, unit=unit)
        case "histogram":
            return HistogramMetricFamily(row.name, row.help, labels=labels, unit=unit)
        case "info":
            return InfoMetricFamily(row.name.removesuffix("_info"), row.help, labels=labels)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = (*map(repr, histogram.bounds), "+Inf")
    return list(zip(bounds, histogram.cumulative_counts(), strict=True))
