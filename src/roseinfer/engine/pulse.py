"""What an engine is doing at this moment, in memory that another process may read while the engine cannot answer.

Knows no steps and no time limits: `client.py` judges. The writer stores two numbers and never waits; a reader may come
at any time.
"""

import mmap
import os
import socket
import tempfile
import time
from enum import StrEnum
from typing import NamedTuple

PAGE_BYTES = 16


class Activity(StrEnum):
    """What an engine does, by its own account; `STUCK` is the front end's word for one that has given none too long."""

    IDLE = "idle"
    STEPPING = "stepping"
    GC = "gc"  # a collection has stopped its interpreter
    CAPTURING = "capturing"  # recording a CUDA graph
    STUCK = "stuck"


_CODES = (Activity.IDLE, Activity.STEPPING, Activity.GC, Activity.CAPTURING)
_IDLE, _STEPPING, _GC, _CAPTURING = range(len(_CODES))


class Account(NamedTuple):
    """An engine's account of itself."""

    activity: Activity
    since_ns: int  # of the monotonic clock


class Pulse:
    """Two int64 in shared memory: what, and since when. The moment is stored first, so it is never that of the past."""

    def __init__(self, memory: memoryview | None = None) -> None:
        self._page = (memory or memoryview(bytearray(PAGE_BYTES))).cast("q")
        self._page[1] = time.monotonic_ns()
        self._page[0] = _IDLE

    def rest(self) -> None:
        """Nothing to do, or nobody to tell."""
        self._page[1] = time.monotonic_ns()
        self._page[0] = _IDLE

    def begin_step(self) -> None:
        self._page[1] = time.monotonic_ns()
        self._page[0] = _STEPPING

    def begin_collection(self) -> None:
        """In the middle of a step, which `begin_step` says goes on, or of nothing."""
        self._page[1] = time.monotonic_ns()
        self._page[0] = _GC

    def begin_capture(self) -> None:
        self._page[1] = time.monotonic_ns()
        self._page[0] = _CAPTURING

    def read(self) -> Account:
        while True:
            code, since_ns = self._page[0], self._page[1]
            if code == self._page[0]:
                return Account(_CODES[code], since_ns)


class SharedPage:
    """The memory of a pulse between two processes: no file of any directory."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("roseinfer-pulse", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self._descriptor = os.dup(file.fileno())
        os.ftruncate(self._descriptor, mmap.PAGESIZE)
        self.pulse = Pulse(memoryview(mmap.mmap(self._descriptor, mmap.PAGESIZE))[:PAGE_BYTES])

    def send(self, connection: socket.socket) -> None:
        """To the process at the other end, as the first byte of the connection; here the descriptor is not kept."""
        socket.send_fds(connection, [b"\0"], [self._descriptor])
        os.close(self._descriptor)


def receive_pulse(connection: socket.socket) -> Pulse:
    """What `SharedPage.send` sent, written from here on. Raises EOFError when the other side has gone."""
    data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not data or not descriptors:
        raise EOFError
    try:
        return Pulse(memoryview(mmap.mmap(descriptors[0], mmap.PAGESIZE))[:PAGE_BYTES])
    finally:
        os.close(descriptors[0])
