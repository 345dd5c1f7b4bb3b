"""Draws docs/images/dashboard-*.png from a minute of load on a real server; needs prometheus.

`python tools/preview_dashboards.py [SECONDS]` starts a server with the embedded model, a Prometheus and a load of short
streams; half-way, long prompts come for some seconds, so that there is a jump to explain. What kube-state-metrics,
cAdvisor and DCGM would report is invented.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from monitoring.live import Prometheus, scraping
from monitoring.outputs import ROOT
from monitoring.preview import picture
from monitoring.queries import dashboards
from monitoring.stand_ins import exporting
from roseinfer.bench.load.launcher import Server, free_port, serve_command

IMAGES = ROOT / "docs" / "images"
NOTE = "embedded model on a CPU, {seconds:.0f} s of load; values of Kubernetes and of GPUs are invented"
SERVER = (
    *("--scheduler.max-prefill-tokens", "1024", "--scheduler.max-num-batched-tokens", "1024"),
    *("--server.stream-interval", "4", "--runner.num-threads", "1", "--tracing.ratio", "0.05"),
)


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    with (
        tempfile.TemporaryDirectory() as name,
        exporting() as exporter_port,
        scraping(Path(name), port := free_port(), exporter_port) as prometheus,
    ):
        began = time.time()
        options = ("--log-level", "error", "--tracing.endpoint", f"http://127.0.0.1:{exporter_port}", *SERVER)
        server = Server(serve_command(port, 0, options), port)
        try:
            prometheus.wait_for("roseinfer_engine_up == 1", 60)
            loaded = time.time()
            load(port, seconds)
        finally:
            server.stop()
        draw_all(prometheus, {"rollout": began}, loaded, seconds)
    return 0


def load(port: int, seconds: float) -> None:
    """Eight streams a second, and in the middle six long prompts a second for a sixth of the time."""
    num_long = round(seconds / 6 * 6)
    at = ",".join(f"{seconds / 2 + i / 6:.3f}" for i in range(num_long))
    options = ["--rate", "8", "--duration", f"{seconds:g}", "--max-tokens", "160-240", "--max-lag-share", "1"]
    options += ["--prompt-tokens", "64", "--shared-prefix-share", "0.5"]
    options += ["--long-prompt-tokens", "900", "--num-long", str(num_long), "--long-at", at, "--long-max-tokens", "4"]
    command = [sys.executable, "-m", "roseinfer", "bench", "serve", "--url", f"http://127.0.0.1:{port}"]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)  # noqa: S603


def draw_all(prometheus: Prometheus, starts: dict[str, float], loaded: float, seconds: float) -> None:
    """From the load on; a dashboard in `starts` from an earlier moment of Unix time."""
    end = time.time() - 1
    for name, board in dashboards().items():
        path = IMAGES / f"dashboard-{name}.png"
        path.write_bytes(picture(board, prometheus, starts.get(name, loaded), end, NOTE.format(seconds=seconds)))
        print(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    sys.exit(main())
