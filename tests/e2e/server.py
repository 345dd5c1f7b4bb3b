"""A real `roseinfer serve` process: started, watched, stopped, with everything it wrote."""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from roseinfer.bench.load import launcher
from roseinfer.bench.load.launcher import free_port, serve_command

PATIENCE_S = 60.0  # for what is over in a moment: it bounds a test that fails, and a test that holds never waits for it


def processor_s(*pids: int) -> float:
    """What these processes have computed so far, in seconds of a core.

    Where something is promised within seconds, a test holds the server to so much of its own time: how long it waits
    for a processor is the machine's doing.
    """
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


class Server(launcher.Server):
    """A server process and what can be asked of it."""

    log_path: Path

    def __init__(self, log_path: Path, *arguments: str, port: int | None = None) -> None:
        # One thread: on a busy machine two wait for each other at every barrier, and these tests measure nothing.
        port = port or free_port()
        super().__init__(serve_command(port, 0, ["--runner.num-threads", "1", *arguments]), port, log_path)

    def post(self, path: str, body: bytes | dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a POST."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as response:
            text: str = response.read().decode()
            return text

    def page(self) -> str:
        return self.get("/metrics")

    def metrics(self) -> dict[str, float]:
        """`name{labels without the model}` -> value."""
        samples = {}
        for family in text_string_to_metric_families(self.page()):
            for sample in family.samples:
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()) if k != "model_name")
                samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return samples

    def wait_metrics(self, timeout_s: float = PATIENCE_S, **expected: float) -> dict[str, float]:
        """Scrape until these unlabelled gauges have these values."""
        deadline = time.monotonic() + timeout_s
        while True:
            samples = self.metrics()
            if all(samples[name] == value for name, value in expected.items()):
                return samples
            assert time.monotonic() < deadline, {name: samples[name] for name in expected}
            time.sleep(0.05)


@contextmanager
def running(log_path: Path, *arguments: str, port: int | None = None) -> Iterator[Server]:
    """A ready server; killed at the end if it still runs then."""
    server = Server(log_path, *arguments, port=port)
    try:
        server.wait_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.stop(signal.SIGKILL)
