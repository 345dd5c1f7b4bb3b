"""`roseinfer bench compare` with real servers: runs in turn, what is kept of them, servers that it starts itself."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roseinfer.bench.compare.compare import started_server
from roseinfer.bench.load.endpoint import find_endpoint
from roseinfer.cli import main as cli
from roseinfer.errors import ConfigError
from tests.e2e.server import Server

NUM_ROUNDS = 6
METRICS = {f"{name} p{percent}" for name in ("TTFT", "TPOT", "ITL", "Latency") for percent in (50, 95, 99)}
METRICS |= {"Throughput", "Goodput"}


def test_runs_in_turn_and_the_same_again_from_what_was_kept(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = server.wait_metrics(roseinfer_num_requests_running=0)
    load = ["--num-requests", "9", "--prompt-tokens", "33", "--max-tokens", "40", "--slo-ttft-ms", "60000"]
    load.append("--equal-sides")
    files = ["--keep", str(tmp_path / "kept"), "--json", str(tmp_path / "live.json")]
    assert cli.main(["bench", "compare", server.url, server.url, *load, *files, "--rounds", str(NUM_ROUNDS)]) == 0
    lines = capsys.readouterr().out.splitlines()
    turns = [line.split(": ")[0] for line in lines if line.startswith("round ")]
    assert turns == [f"round {i + 1}/6, {side}" for i in range(NUM_ROUNDS) for side in ("AB", "BA")[i % 2]]
    assert lines[-1].startswith("Verdict: ")
    live = json.loads((tmp_path / "live.json").read_text())
    assert {finding["metric"] for finding in live["findings"]} | {*live["left_out"]} >= METRICS
    after = server.wait_metrics(roseinfer_num_requests_running=0)
    name = 'roseinfer_requests_total{api="completions",finish_reason="length"}'
    assert after[name] - before[name] == 2 * (NUM_ROUNDS * (9 + 8) + 1), "8 to warm up, and all the first time"
    hits = "roseinfer_prefix_cache_hits_total"
    assert after[hits] - before[hits] == 0, "no run finds prompts of another side's or of another round"

    again = ["--json", str(tmp_path / "kept.json")]
    assert cli.main(["bench", "compare", str(tmp_path / "kept" / "a"), str(tmp_path / "kept" / "b"), *again]) == 0
    kept = {finding["metric"]: finding for finding in json.loads((tmp_path / "kept.json").read_text())["findings"]}
    for finding in live["findings"]:
        if finding["metric"] != "Goodput":
            assert kept[finding["metric"]]["effect"] == pytest.approx(finding["effect"], abs=1e-6)


def test_a_server_that_is_started_serves_and_ends() -> None:
    with started_server("--runner.num-threads 1 --served-model-name ours", "--a", timeout_s=110) as url:
        assert find_endpoint(url, "").model == "ours"
    with pytest.raises(ConfigError, match="nothing answers"):
        find_endpoint(url, "")


def test_a_server_ends_with_a_comparison_that_was_killed() -> None:
    program = (
        "from roseinfer.bench.load.launcher import serving\n"
        "with serving('--runner.num-threads', '1') as server: print(server.pid, flush=True); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True) as owner:
        assert owner.stdout
        status = Path(f"/proc/{int(owner.stdout.readline())}/stat")
        owner.kill()
    deadline = time.monotonic() + 60
    while status.exists() and " Z " not in status.read_text():
        assert time.monotonic() < deadline, "the server outlives the comparison"
        time.sleep(0.05)


def test_a_server_that_does_not_start_says_why() -> None:
    with (
        pytest.raises(ConfigError, match=r"(?s)the server ended with 2: .*--runner.num-threads") as caught,
        started_server("--runner.num-threads many", "--b", timeout_s=110),
    ):
        pass
    assert caught.value.param == "--b"
