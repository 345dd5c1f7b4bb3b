"""The tests of a GPU as a part of its page: counted from what pytest prints, also when they are ended half-way."""

import sys
from pathlib import Path

import pytest

from benchmarks.gpu import checks

PRINTED = """
tests/gpu/test_a.py::test_x[Case(num_heads=2, head_dim=64)] PASSED [ 25%]
tests/gpu/test_a.py::test_y FAILED [ 50%]
tests/gpu/test_a.py::test_z SKIPPED (flashinfer is not installed) [ 75%]
"""


def outcome(tmp_path: Path, ending: str, limit_s: float = 30.0) -> dict[str, object]:
    program = f"import sys, time; print({PRINTED!r}, flush=True); {ending}"
    return checks.run([sys.executable, "-c", program], tmp_path / "x.log", limit_s, {})


@pytest.mark.parametrize(
    ("ending", "note"),
    [
        ("sys.exit(0)", ""),
        ("sys.exit(1)", "did not end well; see x.log"),
        ("print('========= ERROR SUMMARY: 3 errors'); sys.exit(86)", "3 errors by compute-sanitizer; see x.log"),
        ("print('no tests ran in 0.1s'); sys.exit(5)", "no test was collected"),
        ("print('collected 0 items'); print('1 warning in 0.1s'); sys.exit(5)", "no test was collected"),
    ],
)
def test_what_has_become_of_the_tests(tmp_path: Path, ending: str, note: str) -> None:
    found = outcome(tmp_path, ending)
    assert found == {"num_passed": 1, "num_skipped": 1, "failed": ["tests/gpu/test_a.py::test_y"], "note": note}


def test_what_has_run_when_the_time_is_over_is_kept(tmp_path: Path) -> None:
    found = outcome(tmp_path, "time.sleep(60)", 1.0)
    assert (found["num_passed"], found["note"]) == (1, "did not end well; see x.log")


def test_a_missing_sanitizer_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "sanitizer", lambda: None)
    file = tmp_path / "sanitizer.json"
    monkeypatch.setattr(sys, "argv", ["checks", "--sanitizer", "--out", str(file)])
    assert checks.main() == 0
    assert '"compute-sanitizer is absent"' in file.read_text()
