"""Collectors for tests: they take OTLP over HTTP or gRPC, decode it with OpenTelemetry's own messages, and can be
difficult.
"""

import gzip
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Answer = tuple[int, dict[str, str]]
"""Status and headers; over gRPC, every status but 200 is UNAVAILABLE."""
Request = ExportTraceServiceRequest | ExportMetricsServiceRequest


class ReceivingCollector:
    """What came, and what is answered: the answers given, one for each request, and after them 200."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[ExportTraceServiceRequest] = []  # those answered with 200
        self.metrics_requests: list[ExportMetricsServiceRequest] = []  # likewise
        self.num_requests = 0
        self.paths: list[str] = []
        self.headers: list[Mapping[str, str]] = []
        self.url = ""
        self.arrived = threading.Condition()

    def take(self, path: str, headers: Mapping[str, str], request: Request) -> Answer:
        with self.arrived:
            self.num_requests += 1
            self.paths.append(path)
            self.headers.append({name.lower(): value for name, value in headers.items()})
            answer = self.answers.pop(0) if self.answers else (200, {})
            if answer[0] == 200 and isinstance(request, ExportTraceServiceRequest):
                self.requests.append(request)
            elif answer[0] == 200:
                self.metrics_requests.append(request)
            self.arrived.notify_all()
        return answer

    def spans(self) -> list[Span]:
        with self.arrived:
            return [
                span
                for request in self.requests
                for resource_spans in request.resource_spans
                for scope_spans in resource_spans.scope_spans
                for span in scope_spans.spans
            ]

    def trace_ids(self) -> set[str]:
        return {span.trace_id.hex() for span in self.spans()}

    def resource(self) -> dict[str, object]:
        """Of the first request with spans."""
        return attributes(self.requests[0].resource_spans[0].resource.attributes)

    def metrics(self) -> dict[str, Metric]:
        """The newest of each name."""
        with self.arrived:
            return {
                metric.name: metric
                for request in self.metrics_requests
                for resource_metrics in request.resource_metrics
                for scope_metrics in resource_metrics.scope_metrics
                for metric in scope_metrics.metrics
            }

    def wait_for(self, condition: Callable[[list[Span]], bool], timeout_s: float = 60.0) -> list[Span]:
        """The spans, once the condition holds for them."""
        deadline = time.monotonic() + timeout_s
        while not condition(spans := self.spans()):
            assert time.monotonic() < deadline, [span.name for span in spans]
            with self.arrived:
                self.arrived.wait(0.1)
        return spans


_HTTP_MESSAGES = {"metrics": (ExportMetricsServiceRequest, ExportMetricsServiceResponse)}


@contextmanager
def receiving(*answers: Answer, tls: ssl.SSLContext | None = None) -> Iterator[ReceivingCollector]:
    """A collector that listens for HTTP."""
    collector = ReceivingCollector(*answers)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/x-protobuf"
            if self.headers["Content-Encoding"] == "gzip":
                body = gzip.decompress(body)
            signal = self.path.rpartition("/")[2]
            asked, answered = _HTTP_MESSAGES.get(signal, (ExportTraceServiceRequest, ExportTraceServiceResponse))
            status, headers = collector.take(self.path, dict(self.headers), asked.FromString(body))
            answer = answered().SerializeToString() if status == 200 else b"no"
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(answer))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Silent."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, *_: object) -> None:
            """Silent, as when a client does not trust the certificate."""

    server = Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    scheme = "http" if tls is None else "https"
    collector.url = f"{scheme}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def receiving_grpc(*answers: Answer) -> Iterator[ReceivingCollector]:
    """A collector that listens for gRPC."""
    collector = ReceivingCollector(*answers)

    def take(request: Request, context: grpc.ServicerContext) -> None:
        headers = {name: str(value) for name, value in context.invocation_metadata()}
        status, _ = collector.take("", headers, request)
        if status != 200:
            context.abort(grpc.StatusCode.UNAVAILABLE, "no")

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:  # noqa: N802 - gRPC's name
            take(request, context)
            return ExportTraceServiceResponse()

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> ExportMetricsServiceResponse:  # noqa: N802 - likewise
            take(request, context)
            return ExportMetricsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)  # type: ignore[no-untyped-call]
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    collector.url = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def attributes(items: Any) -> dict[str, object]:
    """Of a span, an event or a resource, as Python has them."""
    return {item.key: _value(item.value) for item in items if isinstance(item, KeyValue)}


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
