"""Locust against a real server: every request is counted on both sides, and both see the same latencies.

Locust patches the standard library when it is imported, so it only ever runs in a process of its own.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from roseinfer.bench.load import serve
from roseinfer.bench.load.launcher import free_port
from roseinfer.bench.load.serve import fetch_recording
from roseinfer.cli import main as cli
from roseinfer.observe.metrics.histogram import TOKEN_S, WAIT_S
from roseinfer.observe.recorder.recording import Recording
from tests.e2e.conftest import StartServer
from tests.e2e.server import PATIENCE_S, Server

ROOT = Path(__file__).parents[2]
LOCUST = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py")]
PATH = "/v1/completions"
MAX_TOKENS = 12
HISTOGRAMS = {
    "TTFT": ("time_to_first_token", WAIT_S),
    "TPOT": ("time_per_output_token", TOKEN_S),
    "ITL": ("inter_token_latency", TOKEN_S),
}
SCENARIO = f"""
description: All three shapes in four seconds.
phases:
  - {{kind: ramp, users: 5, duration_s: 2}}
  - {{kind: burst, users: 9, duration_s: 1}}
  - {{kind: steady, users: 4, duration_s: 1}}
rate_per_user: 3
prompt_tokens: 8-16
max_tokens: {MAX_TOKENS}
objective: {{ttft_ms: 60000, tpot_ms: 60000}}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    file = tmp_path / "three.yaml"
    file.write_text(SCENARIO)
    return file


def headless(url: str, *options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [*LOCUST, "--headless", "--only-summary", "--host", url, *options]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL, check=False
    )


def growth(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float:
    return after[name] - before.get(name, 0.0)


def histogram_growth(before: Mapping[str, float], after: Mapping[str, float], name: str) -> list[float]:
    """Cumulative counts of the buckets, in the order of their bounds; those of streams, where these are apart."""
    counts = {}
    for key in after:
        if found := re.fullmatch(rf'{name}_bucket{{le="([^"]+)"(?:,streamed="true")?}}', key):
            counts[float(found[1])] = growth(before, after, key)
    return [counts[bound] for bound in sorted(counts)]


def cumulated(values: Sequence[float], bounds: Sequence[float]) -> list[float]:
    return [float(sum(value <= bound for value in values)) for bound in (*bounds, float("inf"))]


def check_latencies(metrics: Mapping[str, float], seen: Sequence[dict[str, Any]], recording: Recording) -> None:
    """Request by request, joined by id, both sides on one clock.

    The server's histograms are those of its recording, to the last bucket. Nothing is received before it was due, or
    read before it was known. And as one side's definition is the other's, the two figures of a request differ only by
    the way there and back and by waiting for a processor, which half of the requests are spared.
    """
    records = {record.request_id: record for record in recording.requests}
    server = {"TTFT": list[float](), "TPOT": list[float](), "ITL": list[float]()}
    apart_s = {"TTFT": list[float](), "TPOT": list[float]()}
    for row in seen:
        record = records[row["request_id"]]
        written_ns = recording.writes["written_ns"][recording.writes["serial"] == record.serial].tolist()
        first_ns, last_ns = record.token_ns[0], record.token_ns[-1]
        assert row["intended_s"] <= record.recv_ns / 1e9 <= first_ns / 1e9 <= row["first_token_s"]
        assert last_ns / 1e9 <= row["token_times_s"][-1] <= row["end_s"]
        server["TTFT"].append((written_ns[0] - record.recv_ns) / 1e9)
        server["TPOT"].append((last_ns - first_ns) / (len(record.token_ns) - 1) / 1e9)
        server["ITL"] += [(later - earlier) / 1e9 for earlier, later in pairwise(record.token_ns)]
        apart_s["TTFT"].append(abs(row["first_token_s"] - row["sent_s"] - server["TTFT"][-1]))
        if num_later := row["num_tokens"] - row["token_counts"][0]:
            client_s = (row["token_times_s"][-1] - row["first_token_s"]) / num_later
            apart_s["TPOT"].append(abs(client_s - server["TPOT"][-1]))
    for name, (series, bounds) in HISTOGRAMS.items():
        assert histogram_growth({}, metrics, f"roseinfer_{series}_seconds") == cumulated(server[name], bounds), name
    for name, found in apart_s.items():
        allowed_s = bucket_s(statistics.median(server[name]), HISTOGRAMS[name][1]) + 0.002
        assert statistics.median(found) <= allowed_s, (name, allowed_s, found)


def bucket_s(value_s: float, bounds: Sequence[float]) -> float:
    """The width of the bucket that a value falls into."""
    index = bisect_left(bounds, value_s)
    return bounds[index] - (bounds[index - 1] if index else 0.0)


def check_counts(
    before: Mapping[str, float],
    after: Mapping[str, float],
    rows: Mapping[str, dict[str, Any]],
    seen: Sequence[dict[str, Any]],
) -> None:
    """Each request, token and gap that Locust has counted was counted by the server."""
    num_requests, num_tokens = rows["POST"]["num_requests"], rows["POST"]["total_content_length"]
    assert num_requests == len(seen) > 10
    assert num_tokens == num_requests * MAX_TOKENS
    # Where all tokens were due before the first was written they came in one piece, which has no gap to be seen.
    whole = [row["num_tokens"] for row in seen if len(row["token_counts"]) == 1]
    counted = {
        'roseinfer_requests_total{api="completions",finish_reason="length"}': num_requests,
        "roseinfer_requests_received_total": num_requests,
        "roseinfer_generation_tokens_total": num_tokens,
        "roseinfer_client_submit_lag_seconds_count": rows["submit lag"]["num_requests"],
        'roseinfer_time_to_first_token_seconds_count{streamed="true"}': rows["TTFT"]["num_requests"],
        "roseinfer_time_per_output_token_seconds_count": rows["TPOT"]["num_requests"] + len(whole),
        "roseinfer_inter_token_latency_seconds_count": rows["ITL"]["num_requests"] + sum(whole) - len(whole),
    }
    assert {name: growth(before, after, name) for name in counted} == counted


def test_client_and_server_agree(start_server: StartServer, scenario: Path, tmp_path: Path) -> None:
    ops_port = free_port()
    server = start_server("--ops-port", str(ops_port))
    before = server.metrics()
    files = ("--html", "report.html", "--json-file", "report", "--result", "out/result.json", "--max-lag-share", "100")
    ran = headless(server.url, "--scenario", str(scenario), *files, folder=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    after = server.wait_metrics(roseinfer_num_requests_running=0, roseinfer_http_inflight_streams=0)
    rows = {row["method"]: row for row in json.loads((tmp_path / "report.json").read_text())}
    assert {row["name"] for row in rows.values()} == {PATH}
    seen = json.loads((tmp_path / "out" / "result.json").read_text())["requests"]
    check_counts(before, after, rows, seen)
    fetch_recording(f"http://127.0.0.1:{ops_port}", "", tmp_path / "recording.npz")
    check_latencies(after, seen, Recording.load(tmp_path / "recording.npz"))
    assert f"Requests: {len(seen)} ({len(seen)} complete, 0 aborted as planned, 0 failed)" in ran.stdout
    assert f"{len(seen)} of {len(seen)} (100.0%)" in ran.stdout, "goodput, by the scenario's objective"
    assert any("." in key for key in rows["ITL"]["response_times"]), "finer than whole milliseconds"
    page = (tmp_path / "report.html").read_text()
    assert [kind for kind in ("TTFT", "TPOT", "ITL", "submit lag") if f'"{kind}"' not in page] == []


def test_the_same_test_again_finds_none_of_its_prompts_in_the_prefix_cache(
    server: Server, scenario: Path, tmp_path: Path
) -> None:
    scenario.write_text(
        "description: Three at once.\nphases: [{kind: burst, users: 3, duration_s: 1}]\n"
        "rate_per_user: 0.01\nprompt_tokens: 64\nmax_tokens: 1\n"
    )
    before = server.wait_metrics(roseinfer_num_requests_running=0)
    for _ in range(2):
        ran = headless(server.url, "--scenario", str(scenario), folder=tmp_path)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    after = server.wait_metrics(roseinfer_num_requests_running=0)
    assert growth(before, after, "roseinfer_prefix_cache_queries_total") == 2 * 3 * 64
    assert growth(before, after, "roseinfer_prefix_cache_hits_total") == 0


def test_bench_serve_reads_the_same_file(server: Server, scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--scenario", str(scenario), "--max-lag-share", "1"]
    code = cli.main(["bench", "serve", "--url", server.url, *flags])
    told = capsys.readouterr().out
    assert re.search(rf"^Load: (\d+) requests of {scenario}, seed 0$", told, re.MULTILINE)
    assert re.search(r"^Requests: (\d+) \(\1 complete, 0 aborted as planned, 0 failed\)$", told, re.MULTILINE)
    is_valid = "Goodput (TTFT <= 60000 ms, TPOT <= 60000 ms): " in told
    assert code == (0 if is_valid else serve.EXIT_INVALID), "a generator that got no processor says so"
    assert cli.main(["bench", "simulate", "--scenario", str(scenario)]) == 0
    assert f"requests of {scenario}, seed 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--scenario", "steady"), "loadtest: --host: nothing answers at http://127.0.0.1:9/v1/models: "),
        (("--scenario", "wave"), "loadtest: --scenario: wave is no file and none of burst, ramp, steady"),
        (("--result", "/proc/none/result.json"), "loadtest: --result: /proc/none cannot be written: "),
        (("--result", "."), "loadtest: --result: . cannot be written: Is a directory"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    ran = headless("127.0.0.1:9", *options, folder=tmp_path)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert [line for line in ran.stderr.splitlines() if line.startswith(words)], ran.stderr


def test_a_refused_request_fails_and_is_counted(server: Server, scenario: Path, tmp_path: Path) -> None:
    """The prompt does not fit, which the server says."""
    scenario.write_text(SCENARIO.replace(f"max_tokens: {MAX_TOKENS}", "max_tokens: 100000"))
    ran = headless(server.url, "--scenario", str(scenario), "--json-file", "report", folder=tmp_path)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    rows = {row["method"]: row for row in json.loads((tmp_path / "report.json").read_text())}
    assert rows["POST"]["num_failures"] == rows["POST"]["num_requests"] > 0
    assert "TTFT" not in rows


class Page:
    """Locust's web page."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def get(self, path: str) -> str:
        return self._open(path, None)

    def post(self, path: str, **form: str | int) -> str:
        return self._open(path, urllib.parse.urlencode(form).encode())

    def _open(self, path: str, data: bytes | None) -> str:
        with urllib.request.urlopen(self.url + path, data, timeout=PATIENCE_S) as answer:
            text: str = answer.read().decode()
            return text

    def rows(self) -> Counter[str]:
        """Method -> number of requests."""
        stats: dict[str, Any] = json.loads(self.get("/stats/requests"))
        return Counter({row["method"]: row["num_requests"] for row in stats["stats"]})

    def wait(self, path: str = "/") -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                self.get(path)
            except OSError:
                assert self.process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            else:
                return


@contextmanager
def locust_page(url: str, folder: Path) -> Iterator[Page]:
    port = free_port()
    command = [*LOCUST, "--web-host", "127.0.0.1", "--web-port", str(port), "--host", url]
    with (folder / "locust.log").open("wb") as log:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, env=environment
        )
    page = Page(process, f"http://127.0.0.1:{port}")
    try:
        page.wait()
        yield page
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_users_by_hand_on_the_page(server: Server, scenario: Path, tmp_path: Path) -> None:
    with locust_page(server.url, tmp_path) as page:
        assert "scenario" in page.get("/"), "the options can be changed there"
        begun = page.post(
            "/swarm", user_count=3, spawn_rate=3, host=server.url, scenario=str(scenario), free="true", seed=1
        )
        assert json.loads(begun)["success"], begun
        deadline = time.monotonic() + 60
        while page.rows()["TTFT"] < 3:
            assert time.monotonic() < deadline, (tmp_path / "locust.log").read_text()
            time.sleep(0.2)
        page.post("/stop")
        rows = page.rows()
        assert rows["POST"] == rows["TTFT"] == rows["submit lag"]
        assert rows["ITL"] == rows["TPOT"] * (MAX_TOKENS - 1)
        assert rows[""] == rows["POST"], "the row of all counts requests only"
