"""Spans arrive as they were, or are counted; nobody waits for a collector."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.proto.trace.v1 import trace_pb2

from roseinfer.errors import ConfigError
from roseinfer.observe.recorder.recording import ClockPair
from roseinfer.observe.tracing import export
from roseinfer.observe.tracing.export import Collector, SpanExport
from roseinfer.observe.tracing.otlp import Encoder
from roseinfer.observe.tracing.spans import Span, SpanEvent
from tests.collector import attributes, receiving

CLOCK = ClockPair(monotonic_ns=1_000, unix_ns=1_700_000_000_000_000_123)
LATE = 1_699_999_999_999_999_123  # what the calendar is ahead of the monotonic clock


@contextmanager
def exporting(url: str, max_queued_spans: int = 1000) -> Iterator[SpanExport]:
    spans = SpanExport(Collector(url), Encoder({"service.name": "s"}, "1.2", CLOCK), max_queued_spans)
    spans.start()
    try:
        yield spans
    finally:
        spans.close(10.0)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "GATHER_S", 0.01)
    monkeypatch.setattr(export, "FIRST_PAUSE_S", 0.001)


def span(index: int = 1, **changes: object) -> Span:
    facts = {
        "name": f"span {index}",
        "trace_id": 1 << 100 | index,
        "span_id": index,
        "start_ns": 1_001,
        "end_ns": 1_007,
    }
    return Span(**(facts | changes))  # type: ignore[arg-type]


def test_a_span_arrives_as_it_was() -> None:
    sent = span(
        parent_span_id=9,
        has_remote_parent=True,
        is_server=True,
        attributes={"text": "ä", "yes": True, "count": 3, "share": 0.5, "list": ["a", "b"]},
        events=[SpanEvent("happened", 1_003, {"why": "gc"})],
        links=[(1 << 90, 4)],
        error="engine_dead",
    )
    with receiving() as collector:
        with exporting(collector.url) as spans:
            assert spans.put([sent])
            (got,) = collector.wait_for(lambda found: len(found) == 1)
        request = collector.requests[0].resource_spans[0]
        assert collector.paths == ["/v1/traces"]
    assert attributes(request.resource.attributes) == {"service.name": "s"}
    assert (request.scope_spans[0].scope.name, request.scope_spans[0].scope.version) == ("roseinfer", "1.2")
    assert (got.name, got.kind) == ("span 1", trace_pb2.Span.SPAN_KIND_SERVER)
    assert (got.trace_id, got.span_id, got.parent_span_id) == (
        (1 << 100 | 1).to_bytes(16, "big"),
        (1).to_bytes(8, "big"),
        (9).to_bytes(8, "big"),
    )
    assert (got.start_time_unix_nano, got.end_time_unix_nano) == (LATE + 1_001, LATE + 1_007)
    assert attributes(got.attributes) == sent.attributes
    assert (got.events[0].name, got.events[0].time_unix_nano) == ("happened", LATE + 1_003)
    assert attributes(got.events[0].attributes) == {"why": "gc"}
    assert (got.links[0].trace_id, got.links[0].span_id) == ((1 << 90).to_bytes(16, "big"), (4).to_bytes(8, "big"))
    assert (got.status.code, got.status.message) == (trace_pb2.Status.STATUS_CODE_ERROR, "engine_dead")
    assert got.flags & trace_pb2.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


def test_a_root_has_no_parent_and_no_status() -> None:
    with receiving() as collector, exporting(collector.url) as spans:
        spans.put([span()])
        (got,) = collector.wait_for(lambda found: len(found) == 1)
    assert got.parent_span_id == b""
    assert not got.HasField("status")
    assert got.kind == trace_pb2.Span.SPAN_KIND_INTERNAL


def test_many_spans_go_together_in_their_order() -> None:
    with receiving() as collector:
        with exporting(collector.url) as spans:
            for first in range(0, 200, 8):
                spans.put([span(first + i + 1) for i in range(8)])
        found = collector.spans()
        assert [got.name for got in found] == [f"span {i}" for i in range(1, 201)]
        assert collector.num_requests < 10
        assert spans.num_dropped == 0


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_what_a_busy_collector_refuses_is_sent_again(status: int) -> None:
    with receiving((status, {"Retry-After": "0"}), (status, {})) as collector, exporting(collector.url) as spans:
        spans.put([span()])
        collector.wait_for(lambda found: len(found) == 1)
        assert collector.num_requests == 3
    assert spans.num_dropped == 0


def test_what_a_collector_will_never_take_is_sent_once_and_counted() -> None:
    with receiving((400, {}), (404, {})) as collector:
        with exporting(collector.url) as spans:
            spans.put([span(), span(2)])
        assert collector.num_requests == 1
        assert collector.spans() == []
        assert spans.num_dropped == 2


def test_after_so_many_attempts_spans_are_given_up() -> None:
    with receiving(*[(503, {})] * export.MAX_ATTEMPTS) as collector, exporting(collector.url) as spans:
        spans.put([span()])
        while spans.num_dropped < 1:
            time.sleep(0.01)
        assert collector.num_requests == export.MAX_ATTEMPTS
        spans.put([span(2)])
        (got,) = collector.wait_for(lambda found: len(found) == 1)
        assert got.name == "span 2"


def test_spans_that_the_collector_says_it_rejected_are_counted() -> None:
    with receiving() as collector:
        collector.num_rejected = 3
        with exporting(collector.url) as spans:
            spans.put([span(i + 1) for i in range(5)])
        assert spans.num_dropped == 3


def test_what_finds_no_room_is_dropped_whole_and_counted_and_nobody_waits() -> None:
    release = threading.Event()

    class Stuck(Collector):
        def post(self, body: bytes) -> int:
            release.wait(10)
            return super().post(body)

    with receiving() as collector:
        spans = SpanExport(Stuck(collector.url), Encoder({}, "1", CLOCK), max_queued_spans=10)
        spans.start()
        assert spans.put([span(i + 1) for i in range(8)])
        assert not spans.put([span(9), span(10), span(11)])  # too many for what is left
        assert spans.put([span(12), span(13)])
        assert not spans.put([span(14)])
        assert spans.num_dropped == 4
        release.set()
        spans.close(10.0)
        assert len(collector.spans()) == 10
        assert spans.num_dropped == 4


def test_a_slow_collector_gets_everything_in_the_end_and_nobody_waits_for_it() -> None:
    with receiving() as collector:
        collector.delay_s = 0.05
        with exporting(collector.url) as spans:
            for index in range(1, 6):
                assert spans.put([span(index)])
                collector.wait_for(lambda _: collector.num_requests > 0)
        assert len(collector.spans()) == 5
        assert collector.num_requests > 1
    assert spans.num_dropped == 0


def test_closing_delivers_what_is_queued_and_takes_nothing_more() -> None:
    with receiving() as collector, exporting(collector.url) as spans:
        spans.put([span()])
        spans.close(10.0)
        assert len(collector.spans()) == 1
        assert not spans.put([span(2)])
        assert spans.num_dropped == 1


def test_closing_does_not_try_a_dead_port_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "FIRST_PAUSE_S", 1000.0)
    monkeypatch.setattr(export, "MAX_PAUSE_S", 1000.0)
    with exporting(f"http://127.0.0.1:{dead_port()}") as spans:
        spans.put([span()])
        spans.close(10.0)
        assert not spans._thread.is_alive()
        assert spans.num_dropped == 1


def test_closing_leaves_a_collector_that_does_not_answer() -> None:
    """A port that accepts and says nothing: the thread stays behind, and the process may end."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        spans = SpanExport(Collector(f"http://127.0.0.1:{silent.getsockname()[1]}"), Encoder({}, "1", CLOCK), 10)
        spans.start()
        spans.put([span()])
        spans.close(0.05)
        assert spans._thread.is_alive()
        assert spans._thread.daemon
        accepted, _ = silent.accept()
        accepted.close()
        spans._thread.join(10)
        assert spans.num_dropped == 1


def test_a_collector_that_comes_back_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="roseinfer")
    with receiving((400, {}), (400, {})) as collector, exporting(collector.url) as spans:
        for index in range(1, 5):
            spans.put([span(index)])
            while collector.num_requests < index:
                time.sleep(0.005)
        collector.wait_for(lambda found: len(found) == 2)
    messages = [record.getMessage() for record in caplog.records if "collector" in record.getMessage()]
    assert messages == [
        "the collector does not take spans; they are dropped until it does",
        "the collector takes spans again",
    ]


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://example.com:4318", "/v1/traces"),
        ("http://example.com:4318/", "/v1/traces"),
        ("https://example.com/other/v1/traces", "/other/v1/traces"),
        ("http://[::1]:4318/x", "/x"),
    ],
)
def test_an_address_without_a_path_gets_the_usual_one(url: str, path: str) -> None:
    assert Collector(url)._path == path


@pytest.mark.parametrize(
    "url",
    [
        "another",
        "ftp://example.com:1",
        "http://",
        "http://example.com:0",
        "http://example.com:x",
        "http://example.com:99999",
        "http://127.0.0.1@example.com",
        "http://example.com?q",
        f"http://{'a' * 64}.example.com",
        "http://example.com/tracés",
    ],
)
def test_what_is_no_address_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Collector(url)
    assert refusal.value.param == "tracing.endpoint"
    assert url in refusal.value.message


def dead_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
