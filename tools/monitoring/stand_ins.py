"""Serves invented series of kube-state-metrics, cAdvisor and DCGM, and swallows spans: for tests and previews.

None of the three can run without a cluster or a GPU. The exporter here has their names and labels, and its values are
invented: they measure nothing.
"""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from monitoring.promql import GPU, KUBERNETES

NAMESPACE, POD, DEPLOYMENT = "demo", "roseinfer-7c9d5b7f4-x2k8p", "roseinfer"

# Values that only say "so many": everything not named here is 1.
_VALUES = {
    "kube_deployment_spec_replicas": 2.0,
    "kube_deployment_status_replicas_available": 2.0,
    "kube_deployment_status_replicas_updated": 2.0,
    "kube_pod_container_status_restarts_total": 0.0,
    "kube_pod_container_status_waiting_reason": 0.0,
    "kube_pod_container_status_last_terminated_reason": 0.0,
    "kube_pod_container_resource_limits": 4.0,
    "kube_horizontalpodautoscaler_spec_max_replicas": 8.0,
    "kube_horizontalpodautoscaler_status_current_replicas": 2.0,
    "kube_horizontalpodautoscaler_status_desired_replicas": 2.0,
    "container_memory_working_set_bytes": 2.1e9,
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.93,
    "DCGM_FI_PROF_SM_ACTIVE": 0.61,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.18,
    "DCGM_FI_PROF_DRAM_ACTIVE": 0.72,
    "DCGM_FI_PROF_PCIE_RX_BYTES": 1.8e6,
    "DCGM_FI_PROF_PCIE_TX_BYTES": 6e5,
    "DCGM_FI_DEV_FB_USED": 71_000.0,
    "DCGM_FI_DEV_FB_FREE": 10_000.0,
    "DCGM_FI_DEV_POWER_USAGE": 410.0,
    "DCGM_FI_DEV_GPU_TEMP": 61.0,
    "DCGM_FI_DEV_SM_CLOCK": 1_785.0,
    "DCGM_FI_DEV_XID_ERRORS": 0.0,
}
_PER_SECOND = {"container_cpu_usage_seconds_total": 1.6, "container_cpu_cfs_throttled_seconds_total": 0.02}
_STEADY = ("DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE")
_LABELS = {
    "namespace": NAMESPACE,
    "pod": POD,
    "exported_namespace": NAMESPACE,
    "exported_pod": POD,
    "deployment": DEPLOYMENT,
    "horizontalpodautoscaler": DEPLOYMENT,
    "container": "roseinfer",
    "condition": "true",
    "reason": "CrashLoopBackOff",
    "gpu": "0",
    "Hostname": "node-1",
    "modelName": "invented",
}


def page(elapsed_s: float) -> str:
    """The text format, with values that move a little with time so that a picture shows a line."""
    lines = []
    for name, labels in (KUBERNETES | GPU).items():
        value = _VALUES.get(name, 1.0)
        if name in _PER_SECOND:
            value = _PER_SECOND[name] * elapsed_s
        elif name in GPU and name not in _STEADY:
            value *= 1 + 0.03 * math.sin(elapsed_s / 7 + len(name))
        resources = ("cpu", "memory") if "resource" in labels else ("",)
        for resource in resources:
            # The GPU's exporter is asked as without honorLabels, where its own pod is another label.
            chosen = {
                label: _LABELS[label]
                for label in labels
                if label != "resource" and not (name in GPU and label in {"namespace", "pod"})
            }
            chosen |= {"resource": resource} if resource else {}
            amount = value * 2**30 if resource == "memory" else value
            inside = ",".join(f'{label}="{text}"' for label, text in sorted(chosen.items()))
            lines.append(f"{name}{{{inside}}} {amount:g}")
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
