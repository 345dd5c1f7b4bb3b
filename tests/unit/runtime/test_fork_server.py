"""A fork server imports once: children are its forks, one at a time, and it is started anew when it has died."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from roseinfer.runtime.fork_server import ForkServer

MODULE = """
import os, signal, socket, sys
from roseinfer.runtime.child_process import live_as_child
from roseinfer.runtime.fork_server import fork_children, receive_descriptors
from roseinfer.runtime.frames import receive_frame

live_as_child()
with socket.socket(fileno=int(sys.argv[-1])) as control:
    setup = receive_frame(control).decode()
    receive_descriptors(control, int(os.environ.get("NUM_DESCRIPTORS", "0")))
    connection = fork_children(control)
if connection is not None:
    with connection:
        connection.sendall(f"{setup} {os.getpid()} {os.getppid()} {os.getsid(0) == os.getpid()}".encode())
        if connection.recv(1) == b"c":  # it closes its connection, and lives
            connection.close()
            signal.pause()
"""


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[ForkServer]:
    (tmp_path / "forking.py").write_text(MODULE)
    made = ForkServer([str(tmp_path / "forking.py")], b"setup")
    yield made
    made.kill()


def fork(forks: ForkServer) -> tuple[socket.socket, int]:
    """A child's connection, and its process id."""
    ours, theirs = socket.socketpair()
    with theirs:
        forks.fork(theirs)
    ours.settimeout(60)
    setup, pid, parent, leads_session = ours.recv(100).decode().split()
    assert (setup, int(parent), leads_session) == ("setup", forks.pid, "True")
    return ours, int(pid)


def test_a_child_that_died_is_followed_by_another_fork(forks: ForkServer) -> None:
    first, first_pid = fork(forks)
    server = forks.pid
    os.kill(first_pid, signal.SIGKILL)
    assert first.recv(1) == b""
    second, second_pid = fork(forks)
    assert second_pid != first_pid
    assert forks.pid == server
    second.close()
    assert forks.close(second_pid, 60, 60)
    first.close()


def test_a_child_that_has_closed_its_connection_alone_is_killed(forks: ForkServer) -> None:
    with fork(forks)[0] as first:
        first.send(b"c")
        assert first.recv(1) == b""
        second, second_pid = fork(forks)
        (child,) = Path(f"/proc/{forks.pid}/task/{forks.pid}/children").read_text().split()
        assert int(child) == second_pid
        second.close()


def test_children_die_with_the_server_which_is_then_started_anew(forks: ForkServer) -> None:
    with fork(forks)[0] as first:
        server = forks.pid
        os.kill(server, signal.SIGKILL)
        assert first.recv(1) == b""
        with fork(forks)[0] as second:
            assert forks.pid != server
            forks.kill()
            assert second.recv(1) == b""


def test_one_that_does_not_end_is_killed(forks: ForkServer) -> None:
    connection, pid = fork(forks)
    with connection:
        assert not forks.close(pid, 0.05, 0.05)
        assert connection.recv(1) == b""


BEGUN = """
import os, signal, socket, sys
from pathlib import Path
from roseinfer.runtime.child_process import live_as_child
from roseinfer.runtime.fork_server import ForkServer, fork_children, fork_here, receive_descriptors
from roseinfer.runtime.frames import receive_frame

reading, writing = os.pipe()
begun = fork_here(["forking.py", "--fd"])
if isinstance(begun, socket.socket):
    os.close(reading)
    live_as_child()
    setup = receive_frame(begun)
    (descriptor,) = receive_descriptors(begun, 1)
    connection = fork_children(begun)
    if connection is not None:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().rstrip(bytes(1)).split(bytes(1))
        os.write(descriptor, b"%s %d %s" % (setup, os.getppid(), words[-2]))
        connection.recv(1)
    raise SystemExit
forks = ForkServer([sys.argv[1]], b"setup", [writing], begun)
for _ in range(2):
    ours, theirs = socket.socketpair()
    forks.fork(theirs)
    theirs.close()
    setup, pid, shown = os.read(reading, 100).split()
    assert (setup, int(pid), shown) == (b"setup", begun.process.pid, b"--fd"), (setup, pid, shown)
    assert forks.pid == begun.process.pid
os.environ["NUM_DESCRIPTORS"] = "1"
os.kill(forks.pid, signal.SIGKILL)
assert ours.recv(1) == b""
while True:  # until the kernel says that it has gone
    ours, theirs = socket.socketpair()
    forks.fork(theirs)
    theirs.close()
    if forks.pid != begun.process.pid:
        break
ours.settimeout(60)
assert ours.recv(100).split()[0] == b"setup"
forks.kill()
print("done")
"""


def test_the_first_is_a_fork_of_this_process_and_later_ones_are_started(tmp_path: Path) -> None:
    (tmp_path / "forking.py").write_text(MODULE)
    program = [sys.executable, "-c", BEGUN, str(tmp_path / "forking.py")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


BEGUN_AND_GONE = """
import socket, sys
from roseinfer.runtime.fork_server import ForkServer, fork_here

begun = fork_here(["forking.py", "--fd"])
if isinstance(begun, socket.socket):
    raise SystemExit
begun.process.wait()
forks = ForkServer([sys.argv[1]], b"setup", [], begun)
ours, theirs = socket.socketpair()
forks.fork(theirs)
theirs.close()
ours.settimeout(60)
print(ours.recv(100).split()[0].decode(), forks.pid != begun.process.pid)
forks.kill()
"""


def test_one_that_was_begun_and_has_ended_is_started_anew(tmp_path: Path) -> None:
    (tmp_path / "forking.py").write_text(MODULE)
    program = [sys.executable, "-c", BEGUN_AND_GONE, str(tmp_path / "forking.py")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("setup True\n", 0), done.stderr
