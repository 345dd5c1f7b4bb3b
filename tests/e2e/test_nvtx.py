"""A real server under a tool: the steps that traces tell of are the ranges that a profiler sees, by number."""

from pathlib import Path

import pytest

from tests.collector import attributes, receiving
from tests.e2e.conftest import StartServer
from tests.nvtx_tape import Tape, build_recorder

pytestmark = pytest.mark.e2e


def test_a_steps_span_and_its_range_have_the_same_id(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTX_INJECTION64_PATH", str(build_recorder(tmp_path)))
    monkeypatch.setenv("NVTX_RECORDER_FILE", str(tmp_path / "tape"))
    with receiving() as collector:
        server = start_server("--observe.nvtx", "--tracing.endpoint", collector.url, "--tracing.step-interval", "1")
        status, _ = server.post("/v1/completions", {"prompt": "x", "max_tokens": 6, "ignore_eos": True})
        assert status == 200
        assert server.stop() == 0
        steps = [span for span in collector.spans() if span.name == "roseinfer.step"]
    told = [attributes(span.attributes)["roseinfer.step_id"] for span in steps]
    assert len(told) >= 6
    tape = Tape((tmp_path / "tape").read_text())
    assert [found.step_id for found in tape.ranges if found.name == "step"] == told
    assert {inner.name for found in tape.ranges for inner in found.children} >= {"schedule", "launch", "wait", "commit"}
