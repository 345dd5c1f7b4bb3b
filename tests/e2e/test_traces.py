"""A real server, a collector and a real Prometheus: from a bucket to the trace that it names."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import ExponentialHistogramDataPoint, Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from roseinfer.bench.load.launcher import free_port
from tests.collector import ReceivingCollector, attributes, receiving, receiving_grpc
from tests.conftest import require_tool
from tests.e2e.conftest import StartServer
from tests.e2e.server import PATIENCE_S, Server

pytestmark = pytest.mark.e2e

PARENT_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_SPAN = "00f067aa0ba902b7"
Listen = Callable[[], AbstractContextManager[ReceivingCollector]]
PARTS = ["receive", "tokenize", "submit", "queue", "prefill", "decode", "write"]


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")


@pytest.fixture
def collector() -> Iterator[ReceivingCollector]:
    with receiving() as listening:
        yield listening


def requests_of(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]


def traces_of(spans: list[Span]) -> set[str]:
    return {span.trace_id.hex() for span in requests_of(spans)}


def has_all(trace_ids: set[str]) -> Callable[[list[Span]], bool]:
    return lambda spans: trace_ids <= traces_of(spans)


def complete(server: Server, **headers: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0.5}
    status, answer = server.post("/v1/chat/completions", body | {"ignore_eos": True}, **headers)
    assert status == 200, answer


def test_a_request_is_a_span_under_its_caller_with_its_parts(
    start_server: StartServer, collector: ReceivingCollector
) -> None:
    server = start_server("--tracing.endpoint", collector.url, "--tracing.ratio", "0")
    before_ns = time.time_ns()
    complete(server, traceparent=f"00-{PARENT_TRACE}-{PARENT_SPAN}-01")
    after_ns = time.time_ns()
    spans = collector.wait_for(lambda spans: bool(requests_of(spans)))
    (whole,) = requests_of(spans)
    assert whole.name == "chat roseinfer-demo"
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (PARENT_TRACE, PARENT_SPAN)
    assert before_ns < whole.start_time_unix_nano < after_ns
    told = attributes(whole.attributes)
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.usage.output_tokens"] == 8
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    children = [span for span in spans if span.parent_span_id == whole.span_id]
    assert [child.name.removeprefix("roseinfer.") for child in children] == PARTS
    assert {child.trace_id.hex() for child in children} == {PARENT_TRACE}
    stamps = [whole.start_time_unix_nano, *(child.end_time_unix_nano for child in children)]
    assert [child.start_time_unix_nano for child in children] == stamps[:-1]
    (startup,) = [span for span in spans if span.name == "roseinfer.startup"]
    stages = [span for span in spans if span.parent_span_id == startup.span_id]
    assert {"roseinfer.startup.import", "roseinfer.startup.warmup"} <= {span.name for span in stages}
    assert startup.start_time_unix_nano < min(span.start_time_unix_nano for span in stages)
    assert max(span.end_time_unix_nano for span in stages) <= startup.end_time_unix_nano
    assert collector.resource()["service.name"] == "roseinfer"


def durations(collector: ReceivingCollector) -> list[ExponentialHistogramDataPoint]:
    metric = collector.metrics().get("roseinfer_request_duration_seconds", Metric())
    return list(metric.exponential_histogram.data_points)


def is_counted(point: ExponentialHistogramDataPoint) -> bool:
    return bool(point.count and point.exemplars)


@pytest.mark.parametrize(("listen", "protocol"), [(receiving, ""), (receiving_grpc, "grpc")], ids=["http", "grpc"])
def test_the_environment_alone_is_enough(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, listen: Listen, protocol: str
) -> None:
    with listen() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=pod-1")
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
        server = start_server()
        complete(server, traceparent=f"00-{PARENT_TRACE}-{PARENT_SPAN}-01", tracestate="vendor=1")
        (whole,) = requests_of(collector.wait_for(lambda spans: bool(requests_of(spans))))
        with collector.arrived:  # what has the lowest priority may not get to it in the moment that the exit gives
            assert collector.arrived.wait_for(lambda: any(map(is_counted, durations(collector))), PATIENCE_S)
        assert server.stop() == 0
    assert (whole.trace_id.hex(), whole.trace_state) == (PARENT_TRACE, "vendor=1")
    assert collector.resource()["k8s.pod.name"] == "pod-1"
    (duration,) = filter(is_counted, durations(collector))
    assert (duration.count, duration.exemplars[0].span_id) == (1, whole.span_id)


def test_logs_carry_the_trace_id(start_server: StartServer, collector: ReceivingCollector) -> None:
    nothing_is_slow = ("--tracing.slow-ttft-s", "1000", "--observe.slow-gap-min-ms", "100000")
    server = start_server("--tracing.endpoint", collector.url, "--observe.log-format", "json", *nothing_is_slow)
    complete(server, traceparent=f"00-{PARENT_TRACE}-{PARENT_SPAN}-00")
    assert server.stop() == 0
    lines = [json.loads(line) for line in server.log().splitlines()]
    assert {line["logger"] for line in lines if line.get("trace_id") == PARENT_TRACE} == {
        "roseinfer.requests",
        "roseinfer.access",
    }
    assert PARENT_TRACE not in collector.trace_ids()


def test_an_exemplar_that_prometheus_stored_names_a_trace_that_the_collector_got(
    start_server: StartServer, collector: ReceivingCollector, tmp_path: Path
) -> None:
    require_tool("prometheus")
    server = start_server("--tracing.endpoint", collector.url, "--tracing.ratio", "0.5", "--tracing.step-interval", "4")
    with prometheus(server.port, tmp_path) as url:
        for _ in range(24):
            complete(server)
        for name in ("time_to_first_token", "inter_token_latency", "request_duration"):
            found = wait_exemplars(url, f"roseinfer_{name}_seconds_bucket")
            named = {one["labels"]["trace_id"] for one in found}
            collector.wait_for(has_all(named))
            assert all(int(one["labels"]["step_id"]) > 0 for one in found), name
    steps = [span for span in collector.spans() if span.name == "roseinfer.step"]
    linked = {link.trace_id.hex() for step in steps for link in step.links}
    assert len(linked) > 0
    assert all(len(trace_id) == 32 for trace_id in linked)


def test_a_dead_collector_does_not_delay_the_exit(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    server = start_server("--tracing.endpoint", f"http://127.0.0.1:{free_port()}", "--tracing.ratio", "1")
    for _ in range(3):
        complete(server)
    deadline = time.monotonic() + PATIENCE_S
    while "the collector does not take spans" not in server.log():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert server.stop(signal.SIGTERM) == 0
    log = server.log()
    assert "Traceback" not in log


def test_a_collector_that_never_answers_does_not_delay_the_exit(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts. The SDK alone would wait for half a minute, and a request of its exporter for an hour."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        limit_s = 20
        server = start_server(
            "--tracing.endpoint", url, "--tracing.ratio", "1", "--server.drain-timeout-s", str(limit_s)
        )
        complete(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(limit_s) == 0


def test_an_endpoint_that_is_none_ends_the_start(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "--tracing.endpoint", "localhost:4318")
    assert server.process.wait(PATIENCE_S) == 2
    assert "tracing.endpoint" in server.log()


@contextmanager
def prometheus(scraped_port: int, directory: Path, features: str = "exemplar-storage") -> Iterator[str]:
    """A Prometheus with these features that scrapes the server; its address."""
    config = {
        "global": {"scrape_interval": "200ms"},
        "scrape_configs": [
            {"job_name": "roseinfer", "static_configs": [{"targets": [f"127.0.0.1:{scraped_port}"]}]},
        ],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    command = [
        *("prometheus", "--config.file", str(directory / "prometheus.yml"), "--log.level", "warn"),
        *("--storage.tsdb.path", str(directory / "data"), "--web.listen-address", f"127.0.0.1:{port}"),
        *("--enable-feature", features),
    ]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=os.environ)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_exemplars(url: str, query: str, timeout_s: float = PATIENCE_S) -> list[dict[str, Any]]:
    """What `/api/v1/query_exemplars` finds, once it finds something."""
    deadline = time.monotonic() + timeout_s
    while True:
        now = time.time()
        arguments = urllib.parse.urlencode({"query": query, "start": now - 600, "end": now + 60})
        try:
            with urllib.request.urlopen(f"{url}/api/v1/query_exemplars?{arguments}", timeout=PATIENCE_S) as response:
                series = json.loads(response.read())["data"]
        except OSError:
            series = []
        if found := [one for each in series for one in each["exemplars"]]:
            return found
        assert time.monotonic() < deadline, query
        time.sleep(0.1)
