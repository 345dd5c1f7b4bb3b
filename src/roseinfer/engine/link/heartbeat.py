"""What an engine is doing at this moment, in memory that another process may read while the engine cannot answer.

Knows no steps and no time limits: `client.py` judges. Two write, and neither waits: the engine's thread what it does,
and whichever thread a collection stops that there is one. A reader may come at any time.
"""

import mmap
import os
import socket
import tempfile
import time
from enum import StrEnum
from typing import NamedTuple

PAGE_BYTES = 32


class Activity(StrEnum):
    """What an engine does, by its own account; `STUCK` is the front end's word for one that has given none too long."""

    IDLE = "idle"
    STEPPING = "stepping"
    GC = "gc"  # a collection has stopped its interpreter
    CAPTURING = "capturing"  # recording a CUDA graph
    PROFILING = "profiling"  # starting a profiler, or writing what it saw
    STUCK = "stuck"


_CODES = (Activity.IDLE, Activity.STEPPING, Activity.CAPTURING, Activity.PROFILING)
_IDLE, _STEPPING, _CAPTURING, _PROFILING = range(len(_CODES))
_WHAT, _SINCE, _COLLECTING_SINCE, _COLLECTED = range(4)  # where each number is; the others are of nanoseconds


class Account(NamedTuple):
    """An engine's account of itself."""

    activity: Activity
    since_ns: int  # of the monotonic clock, without the collections meanwhile


class Pulse:
    """Four int64 in shared memory: what, since when, since when a collection is under way, and how long others took.

    A collection interrupts what the engine does and ends none of it, whichever thread it came in. So it is told beside
    that, and its time is left out of what the engine has taken; or one after another in a second thread would keep
    an engine alive that hangs.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        self._page = (memory or memoryview(bytearray(PAGE_BYTES))).cast("q")
        self._begin(_IDLE)

    def rest(self) -> None:
        """Nothing to do, or nobody to tell."""
        self._begin(_IDLE)

    def begin_step(self) -> None:
        self._begin(_STEPPING)

    def begin_capture(self) -> None:
        self._begin(_CAPTURING)

    def begin_profiling(self) -> None:
        self._begin(_PROFILING)

    def _begin(self, code: int) -> None:
        """The moment is stored first, so it is never that of the past."""
        self._page[_SINCE] = time.monotonic_ns()
        self._page[_COLLECTED] = 0
        self._page[_COLLECTING_SINCE] = 0  # a collection would have stopped us
        self._page[_WHAT] = code

    def begin_collection(self) -> None:
        """In the middle of whatever the engine does."""
        self._page[_COLLECTING_SINCE] = time.monotonic_ns()

    def end_collection(self) -> None:
        """The engine goes on with what it did."""
        if since_ns := self._page[_COLLECTING_SINCE]:
            self._page[_COLLECTED] += time.monotonic_ns() - since_ns
            self._page[_COLLECTING_SINCE] = 0

    def read(self) -> Account:
        while True:
            code, collecting_since_ns = self._page[_WHAT], self._page[_COLLECTING_SINCE]
            since_ns = self._page[_COLLECTED] + self._page[_SINCE]  # not the other way round: see _begin
            if code == self._page[_WHAT]:
                break
        if collecting_since_ns:
            return Account(Activity.GC, collecting_since_ns)
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
