"""Serves the invented series of stand_ins.prom as an exporter would, and swallows spans: for tests and previews."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

NAMESPACE, POD = "demo", "roseinfer-7c9d5b7f4-x2k8p"  # of the workload there

STAND_INS = Path(__file__).with_name("stand_ins.prom")  # the metrics of others: names, labels and invented values
SAMPLES = [sample for family in text_string_to_metric_families(STAND_INS.read_text()) for sample in family.samples]


def page(elapsed_s: float) -> str:
    """The text format, with values that move a little with time so that a picture shows a line."""
    lines = []
    for name, labels, value, *_ in SAMPLES:
        factor = 1.0
        if name.endswith("_seconds_total"):  # the file has what is used in a second
            factor = elapsed_s
        elif name.startswith("DCGM_FI_"):
            factor += 0.03 * math.sin(elapsed_s / 7 + len(name))
        inside = ",".join(f'{label}="{text}"' for label, text in labels.items())
        lines.append(f"{name}{{{inside}}} {value * factor:g}")
    return "\n".join(lines) + "\n"


class _Server(ThreadingHTTPServer):
    """Says nothing when a client goes away, as Prometheus does at its end."""

    def handle_error(self, *_: object) -> None:
        """The client has gone."""


class _Forgetful(BaseHTTPRequestHandler):
    """Accepts every POST, as a collector would, and answers with an empty message."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(b"", "application/x-protobuf")

    def _answer(self, body: bytes, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Prometheus asks every second."""


@contextmanager
def exporting() -> Iterator[int]:
    """Yields the port, on the loopback, of an exporter that is scraped and of a collector that is posted to."""
    begin = time.monotonic()

    class Exporter(_Forgetful):
        def do_GET(self) -> None:
            self._answer(page(time.monotonic() - begin).encode(), "text/plain; version=0.0.4")

    server = _Server(("127.0.0.1", 0), Exporter)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
