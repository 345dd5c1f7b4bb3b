"""`make first-hour` from its first part to its page, on a CPU, with the embedded model, in a few tokens each."""

import sys
from pathlib import Path

import pytest

from benchmarks import suite
from benchmarks.machine import ROOT
from roseinfer.model.kernels.library import find_built, kernels_directory, levels_here
from tests.conftest import go_without

DEMO = ROOT / "src" / "roseinfer" / "demo"


@pytest.mark.timeout(600)
def test_the_first_hour_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (levels := levels_here()) and find_built(levels[-1], kernels_directory(None)) is None:
        go_without("the kernels are not built: `roseinfer kernels build`")
    words = ["gpu", "--device", "cpu", "--quick", "--model", str(DEMO), "--peers", str(tmp_path / "none")]
    monkeypatch.setattr(sys, "argv", ["suite", *words, "--dir", str(tmp_path)])
    assert suite.main() == 0
    text = (tmp_path / "report.md").read_text()
    for part in suite.SUITES["gpu"]:
        assert f"\n| {part} | `" in text, "its command and its time"
    assert "no test was collected" in text
    assert "0 not measured." in text
    assert "| vllm bfloat16 | not set up |" in text
    assert "failed" not in text.replace("0 failed", "")
