"""Starts a child by a fork of a process that has imported all it needs: `ForkServer` asks, `fork_children` does it.

A fork takes some milliseconds. An interpreter and its imports take a core for half a second, and what else runs there
would wait for them.
"""

import gc
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from roseinfer.runtime.child_process import die_with_parent, end_process, start_process
from roseinfer.runtime.frames import encode_frame


class ForkServer:
    """Runs the process that forks, and starts it anew when it has died. At most one of its children lives.

    `command` starts it, with the descriptor of its end of a socket as the last argument; `setup` is the first frame
    that comes there. Every method blocks. All processes die with the thread that called `fork` first.
    """

    def __init__(self, command: Sequence[str], setup: bytes, pass_fds: Sequence[int] = ()) -> None:
        self._command = command
        self._setup = setup
        self._pass_fds = pass_fds
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

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
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [*self._command, str(theirs.fileno())]
            passed = [theirs.fileno(), *self._pass_fds]
            self._process = start_process(command, stdin=subprocess.DEVNULL, pass_fds=passed)
        self._control.sendall(encode_frame(self._setup))
        socket.send_fds(self._control, [b"\0"], [connection.fileno()])

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
