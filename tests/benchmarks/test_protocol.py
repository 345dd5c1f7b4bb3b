"""The wire between a benchmark and the process that it measures: answers, errors, its end, pausing, its family."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import protocol
from benchmarks.protocol import PeerFailed, Worker

PROGRAM = """
import subprocess, sys
from benchmarks.protocol import answer

print("noise of a library")
sleep = [sys.executable, "-c", "import time; time.sleep(20)"]
child = subprocess.Popen(sleep, start_new_session=True, stdout=subprocess.DEVNULL)

def leave():
    sys.exit(3)

answer({"add": lambda a, b: a + b, "divide": lambda a, b: a / b, "child": lambda: child.pid, "leave": leave})
child.kill()
"""

SETTER = """
import sys
from pathlib import Path
from benchmarks import protocol
from roseinfer.runtime import memory

memory.prefer_huge_pages()
log = Path(sys.argv[1])
printer = "import os; print(sorted(name for name in os.environ if name.startswith('THP')))"
protocol.start([sys.executable, "-c", printer], log).wait(20)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with Worker("adder", [sys.executable, "-c", PROGRAM], tmp_path / "log") as worker:
        yield worker


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for(pid: int, states: str) -> bool:
    """Whether the process comes into one of the states within some seconds."""
    for _ in range(500):
        if state_of(pid) in states:
            return True
        time.sleep(0.01)
    return False


def test_calls_are_answered_whatever_a_library_prints(worker: Worker) -> None:
    assert worker.call("add", a=2, b=3) == 5
    assert worker.call("add", a="a", b="b") == "ab"


def test_a_rival_gets_no_setting_that_the_benchmark_made_for_its_own_torch(tmp_path: Path) -> None:
    log = tmp_path / "log"
    # Without what a test before this one may have set past Python's copy.
    subprocess.run([sys.executable, "-c", SETTER, str(log)], check=True, env=os.environ)
    assert log.read_text().splitlines()[-1] == "[]"


def test_the_worker_reports_an_error_and_goes_on(worker: Worker) -> None:
    with pytest.raises(PeerFailed, match="ZeroDivisionError"):
        worker.call("divide", a=1, b=0)
    assert worker.call("divide", a=1, b=2) == 0.5


def test_a_worker_that_ends_is_a_failure(worker: Worker) -> None:
    for _ in range(2):
        with pytest.raises(PeerFailed, match="adder ended at `leave`"):
            worker.call("leave")


def test_pausing_reaches_children_in_other_sessions(worker: Worker) -> None:
    child = worker.call("child")
    assert set(protocol.family_of(worker.process.pid)) == {worker.process.pid, child}
    worker.pause()
    assert wait_for(child, "T")
    assert wait_for(worker.process.pid, "T")
    worker.resume()
    assert wait_for(child, "SR")
    assert worker.call("add", a=1, b=1) == 2


def test_memory_is_that_of_the_family(worker: Worker) -> None:
    child = worker.call("child")
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    alone_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert worker.peak_rss_mb() > alone_kib * 1024 / 1e6 > 1
    assert protocol.peak_rss_mb(child) > 0
