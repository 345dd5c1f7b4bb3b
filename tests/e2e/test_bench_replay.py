"""`roseinfer bench replay` against a real server: lengths, prefixes and clients that go away, as they were recorded."""

import shlex
from pathlib import Path

import pytest

from roseinfer.bench.load.plan import PlannedRequest, Segment
from roseinfer.bench.simulate.cost_model import DEFAULT
from roseinfer.bench.simulate.simulation import Setup, Simulation
from roseinfer.cli import main as cli
from roseinfer.config.options import CacheConfig, SchedulerConfig
from tests.e2e.server import Server

MS = 1_000_000


def write_recording(path: Path) -> None:
    """Four prompts of 40 tokens, of which three begin with the same 32; the last one's client leaves after 5 tokens."""
    planned = [
        PlannedRequest(
            offset_ns=index * 300 * MS,  # the generator may be late by one such interval
            segments=(Segment(9 if index else 8, 32), Segment(100 + index, 8)),
            max_tokens=900 if index == 3 else 6 + index,
            abort_after_tokens=5 if index == 3 else None,
        )
        for index in range(4)
    ]
    setup = Setup(SchedulerConfig(), CacheConfig(), num_blocks=128, max_model_len=1024, costs=DEFAULT)
    Simulation(setup).run(planned).recording().save(path)


def test_a_recording_is_asked_again(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_recording(tmp_path / "a.npz")
    before = server.wait_metrics(roseinfer_num_requests_running=0)
    # How late this machine is with its requests is no matter of this test.
    command = f"replay {tmp_path / 'a.npz'} --url {server.url} --max-lag-share 1e6 --seed 77"
    assert cli.main(["bench", *shlex.split(command)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Requests: 4 (3 complete, 1 aborted as planned, 0 failed)" in lines
    assert f"Prompt tokens (total): {3 * 40}" in lines
    assert f"Completion tokens (total): {6 + 7 + 8}" in lines
    compared = lines[lines.index("--- recorded -> replayed ---") + 1 :]
    assert [line.split()[0] for line in compared] == ["TTFT", "TPOT", "ITL", "Latency"]
    after = server.wait_metrics(roseinfer_num_requests_running=0)

    def grew(name: str) -> float:
        return after[name] - before[name]

    assert grew("roseinfer_client_disconnects_total") == 1
    assert grew("roseinfer_prefix_cache_queries_total") == 4 * 40
    assert grew("roseinfer_prefix_cache_hits_total") == 2 * 32, "the third and the fourth begin as the second does"
    assert 6 + 7 + 8 + 5 <= grew("roseinfer_generation_tokens_total") < 6 + 7 + 8 + 900


def test_a_file_that_is_no_recording_is_named(
    server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.npz").write_text("hello")
    assert cli.main(["bench", "replay", str(tmp_path / "a.npz"), "--url", server.url]) == cli.EXIT_USAGE
    assert "is no recording of roseinfer" in capsys.readouterr().err
