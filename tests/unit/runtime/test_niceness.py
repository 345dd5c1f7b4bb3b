"""A process makes itself nicer, and its session only when it leads one; a thread itself alone."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from roseinfer.runtime.niceness import be_nicer_in_this_thread, take_turns

SCRIPT = """
import os, sys
from pathlib import Path
from roseinfer.runtime.niceness import be_nicer
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


def test_a_process_that_takes_turns_ends_no_time_slice_of_others_and_a_sandbox_may_forbid_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = (
        "import os; from roseinfer.runtime.niceness import take_turns; take_turns(); print(os.sched_getscheduler(0))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert int(done.stdout) == os.SCHED_BATCH

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    take_turns()


def test_a_thread_makes_itself_nicer_and_no_other() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    with ThreadPoolExecutor(1, initializer=partial(be_nicer_in_this_thread, 3)) as pool:
        assert pool.submit(niceness).result() == min(19, before + 3)
    assert niceness() == before


def test_a_sandbox_that_forbids_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(increment: int) -> int:
        raise PermissionError(increment)

    monkeypatch.setattr(os, "nice", refuse)
    be_nicer_in_this_thread(3)
