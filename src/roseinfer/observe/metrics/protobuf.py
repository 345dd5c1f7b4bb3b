"""Encodes metrics as Prometheus' protobuf, the one format in which it takes native histograms.

The messages are those of Prometheus' client_model, package `io.prometheus.client`, as far as we fill
them; no Python package has them. protobuf is imported for a scraper that asks for the format, and for no other.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from prometheus_client.samples import Exemplar

from roseinfer.observe.metrics.histogram import SCHEMA, ZERO_THRESHOLD, Histogram
from roseinfer.observe.metrics.row import Row

Values = Mapping[tuple[str, ...], float | str | int | Histogram]
Exemplars = Mapping[tuple[str, ...], Sequence[Exemplar | None]]  # one place for each bucket by bound

CONTENT_TYPE = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
_PACKAGE = "io.prometheus.client"
_TYPES = {"counter": 0, "gauge": 1, "info": 1, "histogram": 4}

# Message -> its fields: number, name, type, and whether it is repeated. A type with a capital is a message.
_MESSAGES = {
    "LabelPair": [(1, "name", "string", False), (2, "value", "string", False)],
    "Gauge": [(1, "value", "double", False)],
    "Counter": [(1, "value", "double", False)],
    "Time": [(1, "seconds", "int64", False), (2, "nanos", "int32", False)],  # google.protobuf.Timestamp
    "Exemplar": [(1, "label", "LabelPair", True), (2, "value", "double", False), (3, "timestamp", "Time", False)],
    "Bucket": [
        *((1, "cumulative_count", "uint64", False), (2, "upper_bound", "double", False)),
        (3, "exemplar", "Exemplar", False),
    ],
    "BucketSpan": [(1, "offset", "sint32", False), (2, "length", "uint32", False)],
    "Histogram": [
        *((1, "sample_count", "uint64", False), (2, "sample_sum", "double", False), (3, "bucket", "Bucket", True)),
        *((5, "schema", "sint32", False), (6, "zero_threshold", "double", False), (7, "zero_count", "uint64", False)),
        *((12, "positive_span", "BucketSpan", True), (13, "positive_delta", "sint64", True)),
        (16, "exemplars", "Exemplar", True),
    ],
    "Metric": [
        *((1, "label", "LabelPair", True), (2, "gauge", "Gauge", False), (3, "counter", "Counter", False)),
        (7, "histogram", "Histogram", False),
    ],
    "MetricFamily": [
        *((1, "name", "string", False), (2, "help", "string", False), (3, "type", "int32", False)),
        *((4, "metric", "Metric", True), (5, "unit", "string", False)),
    ],
}


def is_preferred(accept: str) -> bool:
    """Returns whether the Accept header asks for this format, and for no other more."""
    ours, others = 0.0, 0.0
    for part in accept.lower().split(","):
        media_type, *parameters = (piece.strip() for piece in part.split(";"))
        given = dict(parameter.replace(" ", "").partition("=")[::2] for parameter in parameters)
        try:
            quality = float(given.get("q", 1))
        except ValueError:
            continue
        is_ours = given.get("proto") == f"{_PACKAGE}.metricfamily" and given.get("encoding") == "delimited"
        if media_type == "application/vnd.google.protobuf" and is_ours:
            ours = max(ours, quality)
        else:
            others = max(others, quality)
    return ours > 0 and ours >= others


@cache
def _family_message() -> Any:
    """Returns the class of MetricFamily."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="metrics.proto", package=_PACKAGE, syntax="proto2")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for number, name, kind, is_repeated in fields:
            label = field.LABEL_REPEATED if is_repeated else field.LABEL_OPTIONAL
            added = described.field.add(name=name, number=number, label=label)
            if kind[0].isupper():
                added.type, added.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                added.type = getattr(field, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.MetricFamily"))


def encode_family(row: Row, values: Values, exemplars: Exemplars, constant_labels: Mapping[str, str]) -> bytes:
    """Returns the family of one row, with its length before it. `values` and `exemplars` are by label values."""
    family = _family_message()(name=row.name, help=row.help, type=_TYPES[row.kind], unit=row.stated_unit)
    names = [label.name for label in row.labels]
    if row.kind == "info":
        if values:
            labels = {name: str(value) for (name,), value in values.items()}
            _add_metric(family, {**constant_labels, **labels}).gauge.value = 1
        return _with_length(family.SerializeToString())
    for child, value in values.items():
        metric = _add_metric(family, {**constant_labels, **dict(zip(names, child, strict=True))})
        if isinstance(value, Histogram):
            _fill_histogram(metric.histogram, value, exemplars.get(child, ()))
        else:
            (metric.counter if row.kind == "counter" else metric.gauge).value = value
    return _with_length(family.SerializeToString())


def _with_length(payload: bytes) -> bytes:
    length, head = len(payload), bytearray()
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*head, length]) + payload


def _add_metric(family: Any, labels: Mapping[str, str]) -> Any:
    metric = family.metric.add()
    for name, value in labels.items():
        metric.label.add(name=name, value=value)
    return metric


def _fill_histogram(message: Any, values: Histogram, exemplars: Sequence[Exemplar | None]) -> None:
    """Its buckets by bound, with their exemplars, and its native ones."""
    cumulative = values.cumulative_counts()
    message.sample_count, message.sample_sum = cumulative[-1], values.total
    for bound, count in zip((*values.bounds, math.inf), cumulative, strict=True):
        message.bucket.add(cumulative_count=count, upper_bound=bound)
    for bucket, exemplar in zip(message.bucket, exemplars, strict=False):
        if exemplar is not None:
            _fill_exemplar(bucket.exemplar, exemplar)
            message.exemplars.add().CopyFrom(bucket.exemplar)
    message.schema, message.zero_threshold, message.zero_count = SCHEMA, ZERO_THRESHOLD, values.num_zeros
    _fill_spans(message, values)


def _fill_exemplar(message: Any, exemplar: Exemplar) -> None:
    for name, value in exemplar.labels.items():
        message.label.add(name=name, value=value)
    message.value = exemplar.value
    at_s = float(exemplar.timestamp or 0.0)
    message.timestamp.seconds, message.timestamp.nanos = int(at_s), int(at_s % 1 * 1e9)


def _fill_spans(metric: Any, values: Histogram) -> None:
    """Runs of buckets, each as far from the one before as its offset says; counts as differences."""
    next_index, count_before = 0, 0
    for index, count in sorted(values.exponents.items()):
        if not metric.positive_span or index != next_index:
            metric.positive_span.add(offset=index - next_index, length=0)
        metric.positive_span[-1].length += 1
        metric.positive_delta.append(count - count_before)
        next_index, count_before = index + 1, count
    if not metric.positive_span:
        metric.positive_span.add(offset=0, length=0)  # by which a reader tells an empty one from one without
