"""A child is nicer before its module's first line runs, leads its own session, and is talked to over pipes."""

import os
from pathlib import Path

import pytest

from roseinfer.runtime.child_process import start_nicer_child

MODULE = """
import os, sys
print(os.nice(0), os.getsid(0) == os.getpid(), __name__, sys.stdin.read())
"""


def test_a_child_is_nicer_from_its_first_line_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "told_module.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with start_nicer_child("told_module", 3) as child:
        told, _ = child.communicate(b"asked", timeout=60)
    assert told.decode().split() == [str(min(19, os.nice(0) + 3)), "True", "__main__", "asked"]
    assert child.returncode == 0
