"""Dashboards, rules and the demand query on a Prometheus that scrapes a server under Locust's load: all have data.

kube-state-metrics, cAdvisor and DCGM cannot run here. Their panels are fed by a small exporter that has their names and
labels and invented values, so what is proven of those panels is their PromQL.
"""

import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from monitoring import queries
from monitoring.live import Prometheus, scraping
from monitoring.outputs import FOLDER, ROOT
from monitoring.stand_ins import NAMESPACE, exporting
from tests.collector import receiving
from tests.conftest import require_tool
from tests.e2e.server import Server, running
from tests.monitoring.expressions import measured, selectors

pytestmark = pytest.mark.e2e

WINDOW, SPAN = "10m", "10m"  # all of the run, on a slow machine too
TRACED = ("--tracing.ratio", "1")
SCENARIO = """
description: Streams, with long prompts among them.
phases:
  - {kind: steady, users: 4, duration_s: 6}
rate_per_user: 2
prompt_tokens: 8-32
max_tokens: 200
long_prompts: {share: 0.1, prompt_tokens: 300, max_tokens: 8}
objective: {ttft_ms: 60000, tpot_ms: 60000}
"""


@dataclass(frozen=True, slots=True)
class Watched:
    """A server, and the Prometheus that has seen all of its load; `start` and `end` in Unix seconds."""

    server: Server
    prometheus: Prometheus
    start: float
    end: float


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    require_tool("prometheus")
    directory = tmp_path_factory.mktemp("monitoring")
    start = time.time()
    with (
        receiving() as collector,
        exporting() as exporter_port,
        running(directory / "log", "--tracing.endpoint", collector.url, *TRACED) as server,
        scraping(directory, server.port, exporter_port) as prometheus,
    ):
        prometheus.wait_for('count_over_time(up{job="roseinfer"}[30s]) >= 2')  # zeros that rates can rise from
        load(server, directory)
        with long_answers(server):
            prometheus.wait_for(f"{demand().rstrip()} >= 1")
        samples = server.wait_metrics(roseinfer_num_requests_running=0, roseinfer_http_inflight_streams=0)
        requests = samples["roseinfer_requests_received_total"]
        # A scrape of the last request while it ran has all that were received, too.
        prometheus.wait_for(
            f"sum(roseinfer_requests_received_total) == {requests} and sum(roseinfer_num_requests_running) == 0"
        )
        prometheus.wait_for("roseinfer:avail_all:rate5m > 0 and roseinfer:ttft_good:ratio_rate3d >= 0")
        yield Watched(server, prometheus, start, time.time())


def load(server: Server, folder: Path) -> None:
    """Locust's users, some of whose prompts are long, and a refused request."""
    scenario = folder / "scenario.yaml"
    scenario.write_text(SCENARIO)
    locust = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py"), "--headless"]
    command = [*locust, "--only-summary", "--host", server.url, "--scenario", str(scenario), "--max-lag-share", "1"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": -2})[0] == 400


@contextmanager
def long_answers(server: Server) -> Iterator[None]:
    """One request at a time and no pause between two, so that each scrape but the odd one finds a request running."""
    enough = threading.Event()

    def ask() -> None:
        while not enough.is_set():
            server.post("/v1/completions", {"prompt": "x", "max_tokens": 1000, "ignore_eos": True})

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            enough.set()
        asking.result()


def has_a_number(prometheus: Prometheus, expression: str) -> bool:
    return any(math.isfinite(value) for _, value in prometheus.value_of(expression))


def test_every_query_of_every_panel_has_data(watched: Watched) -> None:
    empty = [
        f"{name}: {target.panel}: {target.legend}: {target.expression}"
        for name, board in queries.dashboards().items()
        for panel in queries.panels(board)
        for target in queries.targets(panel, WINDOW, SPAN)
        if panel["title"] != "Which, and whose"  # alerts, of which none fires
        if not has_a_number(watched.prometheus, target.expression)
    ]
    assert empty == []


def test_every_annotation_is_accepted(watched: Watched) -> None:
    for board in queries.dashboards().values():
        for annotation in board["annotations"]["list"]:
            watched.prometheus.value_of(queries.filled(annotation["expr"], WINDOW, SPAN))


def test_the_list_of_alerts_is_accepted(watched: Watched) -> None:
    (panel,) = [each for each in queries.panels(queries.dashboards()["service"]) if each["title"] == "Which, and whose"]
    (target,) = queries.targets(panel, WINDOW, SPAN)
    assert watched.prometheus.value_of(target.expression) == []


def test_every_variable_has_choices(watched: Watched) -> None:
    chosen = {}
    for board in queries.dashboards().values():
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                inside = queries.filled(variable["query"]["query"], WINDOW, SPAN)
                selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", inside).groups()  # type: ignore[union-attr]
                chosen[variable["name"]] = {labels[label] for labels, _ in watched.prometheus.value_of(selector)}
    assert chosen["namespace"] == {NAMESPACE}
    assert chosen["model_name"] == {"roseinfer-demo"}
    assert len(chosen["pod"]) == len(chosen["deployment"]) == 1


def test_every_rule_is_evaluated_and_what_it_looks_at_has_data(watched: Watched) -> None:
    rules = watched.prometheus.rules()
    assert {rule["health"] for rule in rules} == {"ok"}, [rule for rule in rules if rule["health"] != "ok"]
    recorded = {rule["name"] for rule in rules if rule["type"] == "recording"}
    alerts = [rule for rule in rules if rule["type"] == "alerting"]
    assert (len(recorded) > 30, len(alerts)) == (True, 23)
    empty = [name for name in recorded if not has_a_number(watched.prometheus, name)]
    empty += [
        f"{alert['name']}: {expression}"
        for alert in alerts
        for expression in measured(alert["query"])
        if not has_a_number(watched.prometheus, expression)
    ]
    assert empty == []


def test_exemplars_of_every_panel_that_asks_for_them_name_traces(watched: Watched) -> None:
    expressions = {
        target.expression
        for board in queries.dashboards().values()
        for panel in queries.panels(board)
        for target in queries.targets(panel, WINDOW, SPAN)
        if target.exemplar
    }
    assert len(expressions) >= 4
    for expression in expressions:
        found = watched.prometheus.exemplars(expression, watched.start, watched.end)
        assert found, expression
        assert all(re.fullmatch("[0-9a-f]{32}", each["labels"]["trace_id"]) for each in found)


def test_a_panel_says_what_the_server_says(watched: Watched) -> None:
    """The sum over causes is the same through recorded scrapes as on the page itself."""
    page = watched.server.metrics()
    told = {
        labels["cause"]: value
        for labels, value in watched.prometheus.value_of("sum by (cause) (roseinfer_slow_gaps_total)")
    }
    assert told == {cause: page[f'roseinfer_slow_gaps_total{{cause="{cause}"}}'] for cause in told}
    ((_, demanded),) = watched.prometheus.value_of(demand())
    assert demanded == page["roseinfer_num_requests_waiting"] + page["roseinfer_num_requests_running"] == 0


def demand() -> str:
    return (ROOT / FOLDER / "autoscaling.promql").read_text()


def test_the_demand_rose_with_the_load(watched: Watched) -> None:
    samples = watched.prometheus.over_time(demand(), watched.start, watched.end, 1.0)
    assert len(samples) == 1
    assert max(value for _, value in samples[0][1]) >= 1
    assert {selector.name for selector in selectors(demand().splitlines()[-1])} <= set(
        watched.prometheus.get("label/__name__/values")
    )


@pytest.mark.parametrize("name", ["autoscaling.promql", "queue_wait.promql"])
def test_without_any_series_there_is_no_element(name: str, tmp_path: Path) -> None:
    """Lost targets are no demand of 0: KEDA counts an error towards its fallback, and an HPA holds."""
    require_tool("prometheus")
    with scraping(tmp_path, server_port=None) as prometheus:
        assert prometheus.value_of((ROOT / FOLDER / name).read_text()) == []
