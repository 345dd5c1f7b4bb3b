"""Spans arrive through the SDK, or are counted; nobody waits for a collector."""

import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer

from roseinfer.errors import ConfigError
from roseinfer.observe.tracing.export import SpanExport
from roseinfer.observe.tracing.spans import MAX_SPANS
from tests.collector import receiving


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")


class Way:
    """From a tracer to an exporter; what it lost."""

    def __init__(self, exporter: SpanExporter, max_queued: int = 1000, max_batch: int = 8) -> None:
        provider = TracerProvider(shutdown_on_exit=False)
        self.lost_traces: set[int] = set()
        self.export = SpanExport(provider, [exporter], max_queued, max_batch, self.lost_traces.add)
        self._tracer: Tracer = provider.get_tracer("test")

    def put(self, *names: str) -> bool:
        """Makes spans of these names, unless there is no room."""
        is_admitted = self.export.admit()
        for name in names:
            self._tracer.start_span(name).end()
        return is_admitted


@contextmanager
def way_to(url: str, timeout_s: float = 10.0) -> Iterator[Way]:
    way = Way(OTLPSpanExporter(f"{url}/v1/traces", timeout=timeout_s))
    try:
        yield way
    finally:
        way.export.close(10.0)


class Stuck(SpanExporter):
    """Takes nothing before it is told to."""

    def __init__(self) -> None:
        self.release, self.taken = threading.Event(), list[str]()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        assert self.release.wait(30)
        self.taken += [span.name for span in spans]
        return SpanExportResult.SUCCESS


def test_spans_go_together_and_all_of_them_arrive() -> None:
    with receiving() as collector:
        with way_to(collector.url) as way:
            for first in range(0, 200, 8):
                way.put(*(f"span {first + i}" for i in range(8)))
        assert {span.name for span in collector.spans()} == {f"span {i}" for i in range(200)}
        assert collector.num_requests < 100
    assert (way.export.num_lost, way.lost_traces) == (0, set())


def test_what_a_busy_collector_refuses_is_sent_again() -> None:
    with receiving((503, {"Retry-After": "0"}), (429, {"Retry-After": "0"})) as collector, way_to(collector.url) as way:
        way.put("one")
        collector.wait_for(lambda found: len(found) == 1)
        assert collector.num_requests == 3
    assert way.export.num_lost == 0


def test_what_a_collector_will_never_take_is_sent_once_and_counted_and_its_trace_is_named() -> None:
    with receiving((400, {})) as collector:
        with way_to(collector.url) as way:
            way.put("one")
        assert (collector.num_requests, collector.spans()) == (1, [])
    assert (way.export.num_lost, len(way.lost_traces)) == (1, 1)


def test_an_exporter_that_raises_loses_its_batch_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Stuck):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            if not self.taken:
                self.taken.append("nothing")
                raise RuntimeError("broken")
            return super().export(spans)

    exporter = Broken()
    exporter.release.set()
    way = Way(exporter)
    way.put("one")
    while not way.export.num_lost:
        time.sleep(0.001)
    way.put("two")
    way.export.close(10.0)
    assert (exporter.taken, way.export.num_lost) == (["nothing", "two"], 1)


def test_what_finds_no_room_is_dropped_whole_and_counted_and_nobody_waits() -> None:
    exporter = Stuck()
    way = Way(exporter, max_queued=2 * MAX_SPANS)
    names = [str(i) for i in range(MAX_SPANS - 8)]
    assert way.put(*(f"first {name}" for name in names[:8]))
    while way.export.admit() and way.export._outlets[0].num_taken < 8:  # a batch is out of the queue, and stuck
        time.sleep(0.001)
    num_put = 8
    while way.put(*names):
        num_put += len(names)
    assert num_put - 8 + MAX_SPANS > 2 * MAX_SPANS
    assert way.export.num_lost == len(names)
    exporter.release.set()
    way.export.close(10.0)
    assert len(exporter.taken) == num_put
    assert way.export.num_lost == len(names)


def test_closing_delivers_what_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    with receiving() as collector:
        with way_to(collector.url) as way:
            way.put("one")
        assert [span.name for span in collector.spans()] == ["one"]


def test_closing_ends_the_pauses_of_a_dead_port() -> None:
    """The SDK alone would try for ten seconds."""
    with way_to(f"http://127.0.0.1:{dead_port()}") as way:
        way.put(*map(str, range(40)))
        way.export.close(0.05)
        wait_for_threads()
        assert way.export.num_lost == 40


def test_closing_leaves_a_collector_that_does_not_answer() -> None:
    """A port that accepts and says nothing: a thread stays behind, which does not keep the process."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with way_to(url) as way:
            way.put("one")
            way.export.close(0.05)
            behind = sdk_threads()
            assert behind
            assert all(thread.daemon for thread in behind)
            for _ in range(2):  # it tries a connection that ended once more at once
                accepted, _ = silent.accept()
                accepted.close()
            wait_for_threads()
            assert way.export.num_lost == 1


def test_an_outage_is_one_line_with_its_reason_and_its_end_another(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="roseinfer")
    with receiving((401, {}), (401, {})) as collector, way_to(collector.url) as way:
        for index in range(1, 5):
            way.put("one")
            while collector.num_requests < index:
                time.sleep(0.001)
        collector.wait_for(lambda found: len(found) == 2)
    first, last = [record for record in caplog.records if "collector" in record.getMessage()]
    assert first.getMessage() == "the collector does not take spans; they are dropped until it does"
    assert "401" in first.__dict__["reason"]
    assert last.getMessage() == "the collector takes spans again"


def test_limits_that_exclude_each_other_are_refused_by_name() -> None:
    with pytest.raises(ConfigError) as refusal:
        Way(Stuck(), max_queued=50, max_batch=100)
    assert refusal.value.param == "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
    with pytest.raises(ConfigError) as refusal:
        Way(Stuck(), max_queued=MAX_SPANS - 1)
    assert refusal.value.param == "OTEL_BSP_MAX_QUEUE_SIZE"


def sdk_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(("OtelBatch", "roseinfer-otel"))]


def wait_for_threads() -> None:
    for thread in sdk_threads():
        thread.join(30)
        assert not thread.is_alive()


def dead_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
