"""Starts a child by a fork of a process that has imported all it needs: `ForkServer` asks, `fork_children` does it.

That process may itself be a fork of this one (`fork_here`), with which it shares what both have imported. A fork takes
some milliseconds. An interpreter and its imports take a core for half a second, and what else runs there would wait
for them.
"""

import ctypes
import gc
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from roseinfer.runtime.child_process import Child, ForkedChild, die_with_parent, end_process, start_process
from roseinfer.runtime.frames import encode_frame


class Begun(NamedTuple):
    """A process that will fork, and this process's end of the socket."""

    process: Child
    control: socket.socket


def fork_here(command: Sequence[str]) -> Begun | socket.socket | None:
    """Fork this process, for a `ForkServer` or in a child that returns its own end of the socket.

    The child leads a session, and `ps` shows `command` for it. Beside another thread nothing is forked: None.
    """
    if threading.active_count() > 1:
        return None
    ours, theirs = socket.socketpair()
    gc.freeze()  # so that no collection writes to what both have
    pid = os.fork()
    if pid:
        theirs.close()
        return Begun(ForkedChild(pid), ours)
    ours.close()
    os.setsid()
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    _show_command([*command, str(theirs.fileno())])
    return theirs


def _show_command(command: Sequence[str]) -> None:
    """Have `ps` show a command in the place of the one that was started, as far as there is room."""
    with suppress(OSError, IndexError):  # where there is no /proc
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        start, end = map(int, fields[45:47])  # see proc_pid_stat(5)
        words = Path("/proc/self/cmdline").read_bytes().partition(b"\0")[0], *(word.encode() for word in command)
        text = b"\0".join(words)[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))


class ForkServer:
    """Runs the process that forks, and starts it anew when it has died. At most one of its children lives.

    `command` starts it, with the descriptor of its end of a socket as the last argument, unless one is `begun`. The
    first that comes there is the frame `setup`, then the `descriptors`, each with a byte. Every method blocks. All
    processes die with the thread that called `fork` first, or that began.
    """

    def __init__(
        self, command: Sequence[str], setup: bytes, descriptors: Sequence[int] = (), begun: Begun | None = None
    ) -> None:
        self._command = command
        self._setup = setup
        self._descriptors = descriptors
        self._process: Child | None = None
        self._control: socket.socket | None = None
        self._begun = begun

    @property
    def pid(self) -> int:
        """The id of the process that forks, 0 before it is started."""
        return 0 if self._process is None else self._process.pid

    def fork(self, connection: socket.socket) -> None:
        """Has a new child get the connection; the child before it is killed if it lives."""
        if self._control is not None:
            with suppress(OSError):
                socket.send_fds(self._control, [b"\0"], [connection.fileno()])
                return
            self.kill()
        if self._begun is not None:
            begun, self._begun = self._begun, None
            with suppress(OSError):  # it has died since
                self._set_up(begun, connection)
                return
            self.kill()
        self._set_up(self._start(), connection)

    def _set_up(self, started: Begun, connection: socket.socket) -> None:
        self._process, self._control = started
        self._control.sendall(encode_frame(self._setup))
        for descriptor in (*self._descriptors, connection.fileno()):
            socket.send_fds(self._control, [b"\0"], [descriptor])

    def _start(self) -> Begun:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [*self._command, str(theirs.fileno())]
            return Begun(start_process(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]), ours)

    def kill(self) -> None:
        """Ends it and its child at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._control is not None:
            self._control.close()
            self._control = None

    def close(self, pid: int, timeout_s: float, longest_s: float) -> bool:
        """Waits for the end of its child, whose id is `pid`; see `end_process`."""
        if self._process is None or self._control is None:
            return True
        self._control.close()
        return end_process(self._process, timeout_s, longest_s, waits_for=pid)


def receive_descriptors(control: socket.socket, number: int) -> list[int]:
    """The descriptors that a `ForkServer` sends behind its setup."""
    return [socket.recv_fds(control, 1, 1)[1][0] for _ in range(number)]


def fork_children(control: socket.socket) -> socket.socket | None:
    """Forks a child for each connection that comes. Returns it in the child, in a session of its own.

    In the process itself it returns None, when no more connections will come and the last child has ended. Before, it
    waits for no child, so that no other process gets its id.
    """
    gc.collect()
    gc.freeze()  # what was imported, which collections of the children need not walk
    pid = 0
    while True:
        content, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if pid and content:
            os.kill(pid, signal.SIGKILL)  # it may have closed its connection alone
        if pid:
            os.waitpid(pid, 0)
        if not content:
            return None
        pid = os.fork()
        if not pid:
            os.setsid()
            die_with_parent()
            return socket.socket(fileno=descriptors[0])
        os.close(descriptors[0])
