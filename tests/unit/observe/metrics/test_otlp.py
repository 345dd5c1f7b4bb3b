"""Metrics over OTLP: what a collector gets is what the page says, by every variable that docs/metrics.md promises."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from prometheus_client.parser import text_string_to_metric_families

from roseinfer.errors import ConfigError
from roseinfer.observe import otel
from roseinfer.observe.metrics.catalogue import CATALOGUE, VLLM_NAMES
from roseinfer.observe.metrics.exemplars import INTER_TOKEN_LATENCY, Exemplar
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.observe.metrics.otlp import MetricsExport, make_metrics_export
from tests.collector import ReceivingCollector, attributes, receiving, receiving_grpc
from tests.unit.observe.facts import ENGINE, MS, Traffic, make_metrics

SERVER_PID = 7
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
AGGREGATION = "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"
MOVING = ("roseinfer_observability", "roseinfer_scrape", "roseinfer_engine_last_step", "roseinfer_host")
Listen = Callable[[], AbstractContextManager[ReceivingCollector]]


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_") or name.endswith("_CA_BUNDLE")]:
        monkeypatch.delenv(name)


def busy_metrics() -> Metrics:
    metrics = make_metrics()
    metrics.set_engine_info(ENGINE)
    traffic = Traffic(metrics)
    traffic.arrive(3)
    for duration_ms in (5, 7, 7, 60, 1):
        traffic.step(duration_ms * MS, num_admitted=2)
    traffic.reject()
    traffic.drain()
    metrics.put_exemplars([(INTER_TOKEN_LATENCY, Exemplar(0.06, 5, "a" * 32, 4, 9))])
    return metrics


def export(monkeypatch: pytest.MonkeyPatch, metrics: Metrics, **environment: str) -> MetricsExport:
    """As a server would begin to, by the environment."""
    for name, value in {"OTEL_METRICS_EXPORTER": "otlp", **environment}.items():
        monkeypatch.setenv(name, value)
    names = otel.exporter_names("metrics", None, os.environ)
    return make_metrics_export(metrics, "tiny", "1.2.3", names, os.environ, SERVER_PID)


def series(metrics: dict[str, Metric]) -> Iterator[tuple[tuple[str, frozenset[tuple[str, str]]], Any]]:
    for name, metric in metrics.items():
        points = getattr(metric, metric.WhichOneof("data") or "").data_points
        for point in points:
            yield (name, frozenset((key, str(value)) for key, value in attributes(point.attributes).items())), point


@pytest.mark.parametrize("listen", [receiving, receiving_grpc])
def test_the_collector_gets_what_the_page_says(monkeypatch: pytest.MonkeyPatch, listen: Listen) -> None:
    metrics = busy_metrics()
    protocol = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc" if listen is receiving_grpc else "http/protobuf"}
    with listen() as collector:
        export(monkeypatch, metrics, **{ENDPOINT: collector.url, **protocol}).close()
    assert set(collector.paths) == {"/v1/metrics" if listen is receiving else ""}
    found = collector.metrics()
    assert found.keys() == {row.name for row in CATALOGUE} - VLLM_NAMES
    shown = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render("")[0].decode())
        for sample in family.samples
    }
    for (name, labels), point in series(found):
        if name.startswith(MOVING):
            continue
        if found[name].HasField("exponential_histogram"):
            assert (shown[f"{name}_count", labels], shown[f"{name}_sum", labels]) == (point.count, point.sum)
            assert point.count == point.zero_count + sum(point.positive.bucket_counts)
        else:
            assert shown[name, labels] == point.as_double or shown[name, labels] == point.as_int
    counters = [metric for metric in found.values() if metric.HasField("sum")]
    assert all(metric.sum.is_monotonic for metric in counters)
    cumulative = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    assert {metric.sum.aggregation_temporality for metric in counters} == {cumulative}
    assert found["roseinfer_request_duration_seconds"].unit == "s"
    resource = collector.metrics_requests[0].resource_metrics[0].resource
    assert attributes(resource.attributes)["service.name"] == "roseinfer"


def test_a_telemetry_process_that_is_started_again_is_the_same_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the front end counts goes on from the server's start, and the rest begins anew, later."""
    metrics = busy_metrics()
    running = msgspec.structs.replace(metrics.totals.running(), start_unix_s=1e9)
    again = make_metrics()
    again.set_engine_info(ENGINE)
    again.resume(running, 0, 1)
    with receiving() as collector:
        export(monkeypatch, again, **{ENDPOINT: collector.url}).close()
    (resource,) = {message.resource_metrics[0].resource.SerializeToString() for message in collector.metrics_requests}
    assert str(attributes(Resource.FromString(resource).attributes)["service.instance.id"]).endswith(f":{SERVER_PID}")
    start_ns: dict[str, set[int]] = {}
    for (name, _), point in series(collector.metrics()):
        start_ns.setdefault(name, set()).add(point.start_time_unix_nano)
    begun_anew = {"roseinfer_gap_seconds_total", "roseinfer_slow_gaps_total", INTER_TOKEN_LATENCY}
    (anew_ns,) = set.union(*(start_ns[name] for name in begun_anew))
    assert anew_ns > 1e18
    for name in ("roseinfer_generation_tokens_total", "roseinfer_requests_received_total", "roseinfer_requests_total"):
        assert start_ns[name] == {10**18}


def test_a_bucket_of_opentelemetry_begins_where_its_index_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as collector:
        export(monkeypatch, busy_metrics(), **{ENDPOINT: collector.url}).close()
    (point,) = collector.metrics()[INTER_TOKEN_LATENCY].exponential_histogram.data_points
    base = 2.0**2.0**-point.scale
    occupied = [point.positive.offset + i for i, count in enumerate(point.positive.bucket_counts) if count]
    for index, gap_s in zip(occupied, (0.001, 0.007, 0.06), strict=True):
        assert base**index < gap_s <= base ** (index + 1)
    (exemplar,) = point.exemplars
    assert (exemplar.as_double, exemplar.trace_id.hex(), exemplar.span_id.hex()) == (0.06, "a" * 32, f"{9:016x}")
    assert attributes(exemplar.filtered_attributes) == {"step_id": "4"}


def test_buckets_by_bounds_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as collector:
        explicit = {AGGREGATION: "explicit_bucket_histogram"}
        export(monkeypatch, busy_metrics(), **{ENDPOINT: collector.url, **explicit}).close()
    (point,) = collector.metrics()[INTER_TOKEN_LATENCY].histogram.data_points
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    assert (sum(point.bucket_counts), len(point.exemplars)) == (point.count, 1)


def test_exemplars_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as collector:
        without = {"OTEL_METRICS_EXEMPLAR_FILTER": "always_off"}
        export(monkeypatch, busy_metrics(), **{ENDPOINT: collector.url, **without}).close()
    (point,) = collector.metrics()[INTER_TOKEN_LATENCY].exponential_histogram.data_points
    assert (point.count > 0, len(point.exemplars)) == (True, 0)


def test_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as collector:
        running = export(monkeypatch, make_metrics(), **{ENDPOINT: collector.url, "OTEL_METRIC_EXPORT_INTERVAL": "5"})
        with collector.arrived:
            assert collector.arrived.wait_for(lambda: collector.num_requests >= 3, 60)
        running.close()


def test_closing_leaves_a_collector_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "FLUSH_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        running = export(monkeypatch, make_metrics(), **{ENDPOINT: f"http://127.0.0.1:{silent.getsockname()[1]}"})
        running.close()
        assert running._thread.is_alive()
        assert running._thread.daemon
        for _ in range(2):  # it tries a connection that ended once more at once
            accepted, _ = silent.accept()
            accepted.close()
        running._thread.join(30)
        assert not running._thread.is_alive()


def test_without_the_variable_nothing_is_exported() -> None:
    assert otel.exporter_names("metrics", None, {ENDPOINT: "http://127.0.0.1:1"}) == []
    assert otel.exporter_names("metrics", None, {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_METRICS_EXPORTER", "pigeon"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "often"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "1e300"),  # which no clock can wait for
        ("OTEL_METRICS_EXEMPLAR_FILTER", "always_on"),  # there are some of kept traces alone
        (AGGREGATION, "none"),
        ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://$(NODE_IP):4318/v1/metrics"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        export(monkeypatch, make_metrics(), **{name: value})
    assert refusal.value.param == name
