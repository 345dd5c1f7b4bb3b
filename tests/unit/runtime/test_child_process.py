"""A child process answers typed requests over pipes, is nicer from its first line on, and is replaced when it dies."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from roseinfer.errors import NotReady
from roseinfer.runtime import child_process
from roseinfer.runtime.child_process import ChildProcess, end_process, start_process

MODULE = """
import os
NICENESS = os.nice(0)  # before any other import
import sys, time
import msgspec
from roseinfer.errors import InvalidRequest
from roseinfer.runtime.child_process import answer_requests, limit_memory

class Ask(msgspec.Struct):
    what: str

def answer(ask, payload):
    match ask.what:
        case "echo":
            return payload[::-1]
        case "facts":
            return f"{NICENESS} {os.getsid(0) == os.getpid()} {os.getpid()} {__name__}".encode()
        case "refuse":
            raise InvalidRequest("No such thing.")
        case "die":
            os._exit(3)
        case "memory":
            limit_memory(64 << 20)
            bytearray(128 << 20)
        case "sleep":
            time.sleep(600)
        case "compute":
            while True:
                pass

answer_requests(Ask, answer)
"""


class Ask(msgspec.Struct):
    what: str


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildProcess]:
    (tmp_path / "answering.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    made = ChildProcess("answering", niceness=3)
    yield made
    made.close()


def test_a_child_is_nicer_from_its_first_line_on_and_stays_for_the_next_request(child: ChildProcess) -> None:
    facts = child.request(Ask("facts")).payload.decode().split()
    assert facts[:2] == [str(min(19, os.nice(0) + 3)), "True"]
    assert facts[3] == "__main__"
    assert child.request(Ask("facts")).payload.decode().split() == facts


def test_payloads_and_refusals_come_back(child: ChildProcess) -> None:
    payload = bytes(range(256)) * 10_000
    assert child.request(Ask("echo"), payload) == ("", payload[::-1])
    assert child.request(Ask("refuse")) == ("No such thing.", b"")
    assert child.request(Ask("echo"), b"") == ("", b"")


def test_a_child_leaves_signals_to_its_parent_before_it_imports_anything(child: ChildProcess, tmp_path: Path) -> None:
    module = tmp_path / "answering.py"
    module.write_text(f"import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n{module.read_text()}")
    assert child.request(Ask("echo"), b"ab").payload == b"ba"


@pytest.mark.parametrize("what", ["die", "memory"])
def test_a_child_that_died_is_named_and_replaced(child: ChildProcess, what: str) -> None:
    with pytest.raises(EOFError, match="the process of answering ended before it answered"):
        child.request(Ask(what), timeout_s=60)
    assert child.request(Ask("echo"), b"ab").payload == b"ba"


def test_a_child_that_computes_too_long_is_replaced(child: ChildProcess) -> None:
    assert child.request(Ask("echo"), b"ab").payload == b"ba"
    first = child.process
    with pytest.raises(TimeoutError):
        child.request(Ask("compute"), timeout_s=0.1)
    assert first is not None
    assert first.returncode == -signal.SIGKILL
    assert child.request(Ask("echo"), b"ab").payload == b"ba"


def test_a_child_that_sleeps_has_five_times_as_long(child: ChildProcess) -> None:
    child.request(Ask("echo"))
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        child.request(Ask("sleep"), timeout_s=0.1)
    assert 0.5 <= time.monotonic() - begin < 60


def test_closing_ends_the_request_under_way_and_refuses_the_next(child: ChildProcess) -> None:
    child.request(Ask("echo"))
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(child.request, Ask("sleep"))
        while not child._turn.locked():
            time.sleep(0.001)
        child.close()
        with pytest.raises(NotReady):
            asked.result(timeout=30)
    with pytest.raises(NotReady):
        child.request(Ask("echo"))


def test_ending_waits_for_an_exit_and_then_kills() -> None:
    process = start_process(["-c", "import sys; sys.exit(3)"])
    assert end_process(process, 60)
    assert process.returncode == 3
    process = start_process(["-c", "import time; time.sleep(600)"])
    assert not end_process(process, 0.01, 60)
    assert process.returncode == -signal.SIGKILL


def test_time_without_a_processor_does_not_count_for_an_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "waited_s", lambda _: time.monotonic())  # it has had none at all
    process = start_process(["-c", "input()"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    threading.Timer(0.1, process.stdin.close).start()
    assert end_process(process, 0.02, 60)
    process = start_process(["-c", "import time; time.sleep(600)"])
    assert not end_process(process, 0.01, 0.02)
