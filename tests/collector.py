"""A collector for tests: takes OTLP over HTTP, decodes it with OpenTelemetry's own messages, and can be difficult."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Answer = tuple[int, dict[str, str]]
"""Status and headers."""


class ReceivingCollector:
    """What came, and what is answered: the answers given, one for each request, and after them 200."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.delay_s = 0.0
        self.num_rejected = 0  # that each answer with 200 tells of
        self.requests: list[ExportTraceServiceRequest] = []  # those answered with 200
        self.num_requests = 0
        self.paths: list[str] = []
        self.url = ""
        self.arrived = threading.Condition()

    def take(self, path: str, headers: Any, body: bytes) -> Answer:
        time.sleep(self.delay_s)
        with self.arrived:
            self.num_requests += 1
            self.paths.append(path)
            answer = self.answers.pop(0) if self.answers else (200, {})
            if answer[0] == 200:
                assert headers["Content-Type"] == "application/x-protobuf"
                self.requests.append(ExportTraceServiceRequest.FromString(body))
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

    def wait_for(self, condition: Callable[[list[Span]], bool], timeout_s: float = 60.0) -> list[Span]:
        """The spans, once the condition holds for them."""
        deadline = time.monotonic() + timeout_s
        while not condition(spans := self.spans()):
            assert time.monotonic() < deadline, [span.name for span in spans]
            with self.arrived:
                self.arrived.wait(0.1)
        return spans


@contextmanager
def receiving(*answers: Answer) -> Iterator[ReceivingCollector]:
    """A collector that listens."""
    collector = ReceivingCollector(*answers)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, headers = collector.take(self.path, self.headers, body)
            response = ExportTraceServiceResponse()
            response.partial_success.rejected_spans = collector.num_rejected
            answer = response.SerializeToString() if status == 200 else b"no"
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(answer))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(items: Any) -> dict[str, object]:
    """Of a span, an event or a resource, as Python has them."""
    return {item.key: _value(item.value) for item in items if isinstance(item, KeyValue)}


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
