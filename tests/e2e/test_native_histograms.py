"""A real Prometheus that takes native histograms, and a real server."""

import json
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from tests.collector import receiving
from tests.conftest import require_tool
from tests.e2e.conftest import StartServer
from tests.e2e.server import PATIENCE_S
from tests.e2e.test_traces import complete, prometheus, wait_exemplars

pytestmark = pytest.mark.e2e


def ask(url: str, query: str) -> list[float]:
    """The values of an instant query."""
    arguments = urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{arguments}", timeout=PATIENCE_S) as response:
            found = json.loads(response.read())["data"]["result"]
    except OSError:
        return []
    return [float(one["value"][1]) for one in found]


def wait_for(url: str, query: str, expected: float) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (found := ask(url, query)) != [expected]:
        assert time.monotonic() < deadline, (query, found, expected)
        time.sleep(0.1)


def test_prometheus_takes_native_histograms_and_everything_else(start_server: StartServer, tmp_path: Path) -> None:
    require_tool("prometheus")
    with receiving() as collector:
        server = start_server("--tracing.endpoint", collector.url, "--tracing.ratio", "1")
        with prometheus(server.port, tmp_path, "exemplar-storage,native-histograms") as url:
            for _ in range(3):
                complete(server)
            samples = server.wait_metrics(roseinfer_http_inflight_streams=0)
            name = "roseinfer_inter_token_latency_seconds"
            wait_for(url, f"histogram_count({name})", samples[f"{name}_count"])
            assert ask(url, f"histogram_sum({name})") == [pytest.approx(samples[f"{name}_sum"])]
            (median,) = ask(url, f"histogram_quantile(0.5, {name})")
            assert 0 < median < samples[f"{name}_sum"]
            assert ask(url, f"{name}_bucket") == []  # so it is the native one that answered
            wait_for(url, "sum(roseinfer_requests_total)", 3)
            assert ask(url, "roseinfer_engine_up") == [1]
            assert len(ask(url, "roseinfer_model_info")) == 1
            assert wait_exemplars(url, name)
