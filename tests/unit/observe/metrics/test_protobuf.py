"""Prometheus' protobuf: what it says is what the text says, and native histograms beside it.

That Prometheus reads it is in tests/e2e/test_native_histograms.py.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from roseinfer.observe.metrics import protobuf
from roseinfer.observe.metrics.exemplars import INTER_TOKEN_LATENCY, Exemplar
from roseinfer.observe.metrics.histogram import SCHEMA, ZERO_THRESHOLD, Histogram
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.observe.metrics.row import Row
from roseinfer.records import LifecycleState
from tests.unit.observe.facts import ENGINE, MS, Traffic, make_metrics

ACCEPT = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
TEXT = "text/plain;version=0.0.4"


@pytest.mark.parametrize(
    ("accept", "is_preferred"),
    [
        (f"{ACCEPT},application/openmetrics-text;version=1.0.0;q=0.8,{TEXT};q=0.5,*/*;q=0.1", True),  # Prometheus'
        (f"{ACCEPT};q=0.6,{TEXT};q=0.5", True),
        (ACCEPT.replace(";", " ; "), True),
        (f"{TEXT};q=0.6,{ACCEPT};q=0.5", False),
        (f"{ACCEPT};q=0", False),
        (ACCEPT.replace("delimited", "text"), False),
        ("application/vnd.google.protobuf", False),
        (f"{ACCEPT};q=much,{TEXT}", False),
        (TEXT, False),
        ("", False),
    ],
)
def test_it_is_what_a_scraper_gets_that_prefers_it(accept: str, is_preferred: bool) -> None:
    assert protobuf.is_preferred(accept) is is_preferred
    _, content_type = make_metrics().render(accept)
    assert (content_type == protobuf.CONTENT_TYPE) is is_preferred


def decoded(page: bytes) -> Iterator[Any]:
    while page:
        length = shift = index = 0
        while True:
            length |= (page[index] & 0x7F) << shift
            index, shift = index + 1, shift + 7
            if page[index - 1] < 0x80:
                break
        yield protobuf._family_message().FromString(page[index : index + length])
        page = page[index + length :]


def busy_metrics() -> Metrics:
    metrics = make_metrics()
    metrics.set_engine_info(ENGINE)
    traffic = Traffic(metrics)
    traffic.arrive(3)
    traffic.arrive(3)
    for duration_ms in (5, 7, 7, 60, 1):
        traffic.step(duration_ms * MS, num_admitted=2)
    traffic.reject()
    traffic.drain()
    return metrics


def test_the_page_says_what_the_text_says() -> None:
    metrics = busy_metrics()
    told: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in decoded(metrics.render(ACCEPT)[0]):
        for metric in family.metric:
            labels = {label.name: label.value for label in metric.label}
            if family.type == 4:
                for bucket in metric.histogram.bucket:
                    bound = "+Inf" if math.isinf(bucket.upper_bound) else repr(bucket.upper_bound)
                    told[f"{family.name}_bucket", frozenset({**labels, "le": bound}.items())] = bucket.cumulative_count
                told[f"{family.name}_sum", frozenset(labels.items())] = metric.histogram.sample_sum
                told[f"{family.name}_count", frozenset(labels.items())] = metric.histogram.sample_count
            else:
                value = metric.counter.value if family.type == 0 else metric.gauge.value
                told[family.name, frozenset(labels.items())] = value
    shown = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render(TEXT)[0].decode())
        for sample in family.samples
    }
    moving = ("roseinfer_observability", "roseinfer_scrape", "roseinfer_engine_last_step", "roseinfer_host")
    assert told.keys() == shown.keys()
    for series, value in shown.items():
        assert told[series] == value or series[0].startswith(moving), series


def test_a_message_is_kept_as_long_as_it_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, encode_family = busy_metrics(), protobuf.encode_family
    encoded: list[str] = []

    def noted(row: Row, *others: Any) -> bytes:
        encoded.append(row.name)
        return encode_family(row, *others)

    metrics.render(ACCEPT)
    monkeypatch.setattr(protobuf, "encode_family", noted)
    metrics.put_exemplars([(INTER_TOKEN_LATENCY, Exemplar(0.06, 5, "a" * 32, 4, 9))])
    metrics.on_lifecycle(LifecycleState.DRAINING)
    snapshot = metrics.snapshot()
    page = metrics._encode_protobuf(snapshot)
    assert {INTER_TOKEN_LATENCY, "roseinfer_lifecycle_state"} <= set(encoded)
    assert "roseinfer_step_seconds" not in encoded
    metrics._messages = {}
    assert metrics._encode_protobuf(snapshot) == page


def test_native_buckets_hold_what_the_others_hold_and_exemplars_are_in_both() -> None:
    metrics = busy_metrics()
    metrics.put_exemplars([(INTER_TOKEN_LATENCY, Exemplar(0.06, 5, "a" * 32, 4, 9))])
    for family in decoded(metrics.render(ACCEPT)[0]):
        for metric in family.metric if family.type == 4 else ():
            found = metric.histogram
            assert sum(counts_of(found).values()) + found.zero_count == found.sample_count
            if family.name == INTER_TOKEN_LATENCY:
                (classic,) = [bucket.exemplar for bucket in found.bucket if bucket.HasField("exemplar")]
                assert [classic] == list(found.exemplars)
                labels = {label.name: label.value for label in classic.label}
                assert labels == {"trace_id": "a" * 32, "span_id": "0000000000000009", "step_id": "4"}
                assert (classic.value, classic.timestamp.seconds > 1_700_000_000) == (0.06, True)


def counts_of(message: Any) -> dict[int, int]:
    """By index, as the format says that spans and deltas are read."""
    counts, index, count, deltas = dict[int, int](), 0, 0, iter(message.positive_delta)
    for span in message.positive_span:
        index += span.offset
        for _ in range(span.length):
            count += next(deltas)
            counts[index] = count
            index += 1
    assert next(deltas, None) is None
    return counts


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.floats(min_value=0, max_value=1e6), st.sampled_from([0.0, 0.5, 1.0, 2.0, 5e-324]))))
def test_a_native_bucket_holds_what_is_above_its_lower_bound_and_at_most_its_upper(values: list[float]) -> None:
    histogram = Histogram((1.0,))
    histogram.add(values)
    message = protobuf._family_message()().metric.add().histogram
    protobuf._fill_histogram(message, histogram, ())
    counts = counts_of(message)
    assert len(message.positive_span) >= 1
    assert message.zero_count == sum(value <= ZERO_THRESHOLD for value in values)
    factor = 2**2.0**-SCHEMA
    for index, count in counts.items():
        positive = [value for value in values if value > ZERO_THRESHOLD]
        exact = [value for value in positive if math.ceil(math.log2(value) * 2**SCHEMA) == index]
        assert count == len(exact)
        assert all(factor ** (index - 1) * (1 - 1e-9) < value <= factor**index * (1 + 1e-9) for value in exact)
