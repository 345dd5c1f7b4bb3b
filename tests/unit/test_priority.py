"""A process makes itself nicer, and its session only when it leads one."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
from pathlib import Path
from roseinfer.priority import be_nicer
before = os.nice(0)
be_nicer(int(sys.argv[1]), Path(sys.argv[2]))
print(os.nice(0) - before)
"""


@pytest.mark.parametrize(("increment", "leads", "told"), [(3, True, True), (3, False, False), (0, True, False)])
def test_only_who_leads_a_session_makes_it_nicer(tmp_path: Path, increment: int, leads: bool, told: bool) -> None:
    group = tmp_path / "autogroup"
    command = [sys.executable, "-c", SCRIPT, str(increment), str(group)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, start_new_session=leads)
    assert int(done.stdout) == increment
    assert group.exists() == told


def test_a_kernel_without_weighed_sessions_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, "1", str(tmp_path / "none" / "autogroup")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, start_new_session=True)
    assert int(done.stdout) == 1
