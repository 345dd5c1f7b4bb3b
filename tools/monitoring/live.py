"""Runs a real Prometheus with our rules, which scrapes a server, and queries it."""

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from monitoring.outputs import FOLDER, ROOT
from monitoring.stand_ins import NAMESPACE, POD
from roseinfer.bench.load.launcher import free_port
from roseinfer.runtime.child_process import end_process

START_TIMEOUT_S = 60.0
RULE_FILES = [str(ROOT / FOLDER / "rules" / name) for name in ("recording.yaml", "alerts.yaml")]

Sample = tuple[float, float]
"""Unix seconds and a value."""


class Prometheus:
    """A running Prometheus and its HTTP API. A query that it refuses is an HTTPError with its message."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **arguments: str | float) -> Any:
        query = urllib.parse.urlencode(arguments)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as response:  # noqa: S310
                return json.loads(response.read())["data"]
        except urllib.error.HTTPError as error:
            error.msg = f"{error.msg}: {error.read().decode()}"
            raise

    def value_of(self, expression: str, at: float | None = None) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each element that the expression has."""
        moment = {} if at is None else {"time": at}
        data = self.get("query", query=expression, **moment)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(each["metric"], float(each["value"][1])) for each in data["result"]]

    def over_time(
        self, expression: str, start: float, end: float, step_s: float
    ) -> list[tuple[dict[str, str], list[Sample]]]:
        data = self.get("query_range", query=expression, start=start, end=end, step=step_s)
        return [(each["metric"], [(at, float(value)) for at, value in each["values"]]) for each in data["result"]]

    def exemplars(self, expression: str, start: float, end: float) -> list[dict[str, Any]]:
        data = self.get("query_exemplars", query=expression, start=start, end=end)
        return [exemplar for series in data for exemplar in series["exemplars"]]

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def wait_for(self, expression: str, timeout_s: float = 60.0) -> list[tuple[dict[str, str], float]]:
        """What the expression has, once it has something."""
        deadline = time.monotonic() + timeout_s
        while not (found := self._try(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing after {timeout_s} s: {expression}")
            time.sleep(0.1)
        return found

    def _try(self, expression: str) -> list[tuple[dict[str, str], float]]:
        try:
            return self.value_of(expression)
        except urllib.error.HTTPError as error:
            if error.code != 503:  # which it answers while it starts
                raise
            return []
        except OSError:  # it does not listen yet
            return []


@contextmanager
def scraping(directory: Path, server_port: int | None, exporter_port: int | None = None) -> Iterator[Prometheus]:
    """A Prometheus with our rules, which scrapes the server, and the exporter; without: nothing.

    Every two seconds, which are also what a page may take: with one, beside other tests, nothing was seen for a minute.
    """
    jobs = []
    if server_port is not None:
        jobs.append(_job("roseinfer", server_port, {"namespace": NAMESPACE, "pod": POD}))
    if exporter_port is not None:
        jobs.append(_job("stand-ins", exporter_port, {}))
    config = {
        "global": {"scrape_interval": "2s", "evaluation_interval": "1s"},
        "rule_files": RULE_FILES,
        "scrape_configs": jobs,
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    command = [
        *("prometheus", "--config.file", str(directory / "prometheus.yml"), "--log.level", "warn"),
        *("--storage.tsdb.path", str(directory / "data"), "--web.listen-address", f"127.0.0.1:{port}"),
        *("--enable-feature", "exemplar-storage"),
    ]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)  # noqa: S603
    try:
        prometheus = Prometheus(f"http://127.0.0.1:{port}")
        prometheus.wait_for("vector(1)", START_TIMEOUT_S)
        yield prometheus
    finally:
        process.terminate()
        end_process(process, 10)


def _job(name: str, port: int, labels: Mapping[str, str]) -> dict[str, Any]:
    return {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"], "labels": dict(labels)}]}
