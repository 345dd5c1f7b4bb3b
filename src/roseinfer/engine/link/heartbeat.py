"""The engine's heartbeat: what it is doing now, in memory that the front end can read while the engine cannot answer.

Two write, and neither waits: the engine's thread, and whichever thread a garbage collection stops. A reader may come at
any time. The judgement whether an engine is stuck is `client.py`'s.
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
    """What an engine is doing; `STUCK` is the front end's judgement of one that has reported nothing for too long."""

    IDLE = "idle"
    STEPPING = "stepping"
    GC = "gc"  # a collection has stopped its interpreter
    CAPTURING = "capturing"  # recording a CUDA graph
    PROFILING = "profiling"  # starting a profiler, or writing its trace
    STUCK = "stuck"


_ACTIVITIES = (Activity.IDLE, Activity.STEPPING, Activity.CAPTURING, Activity.PROFILING)  # by their codes
_CODES = {activity: code for code, activity in enumerate(_ACTIVITIES)}
_WHAT, _SINCE, _COLLECTING_SINCE, _COLLECTED = range(4)  # indexes into the page; all but the first in nanoseconds


class Account(NamedTuple):
    """What an engine is doing, and since when."""

    activity: Activity
    since_ns: int  # of the monotonic clock, without the collections meanwhile


class Heartbeat:
    """Four int64 in shared memory: activity, since when, since when a collection is under way, time of past ones.

    A collection interrupts an activity and ends none, whichever thread it runs in. So it is kept beside the activity,
    and its time does not count as the activity's. Otherwise collections one after another in a second thread would make
    an engine that hangs look alive.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        self._page = (memory or memoryview(bytearray(PAGE_BYTES))).cast("q")
        self.begin(Activity.IDLE)

    def begin(self, activity: Activity) -> None:
        """Begin one of the activities other than GC; its moment is stored first, so that a reader gets no older one."""
        self._page[_SINCE] = time.monotonic_ns()
        self._page[_COLLECTED] = 0
        self._page[_COLLECTING_SINCE] = 0  # a collection would have stopped us
        self._page[_WHAT] = _CODES[activity]

    def begin_collection(self) -> None:
        """Note a garbage collection in the middle of the present activity."""
        self._page[_COLLECTING_SINCE] = time.monotonic_ns()

    def end_collection(self) -> None:
        if since_ns := self._page[_COLLECTING_SINCE]:
            self._page[_COLLECTED] += time.monotonic_ns() - since_ns
            self._page[_COLLECTING_SINCE] = 0

    def read(self) -> Account:
        while True:
            code, collecting_since_ns = self._page[_WHAT], self._page[_COLLECTING_SINCE]
            since_ns = self._page[_COLLECTED] + self._page[_SINCE]  # not the other way round: see `begin`
            if code == self._page[_WHAT]:
                break
        if collecting_since_ns:
            return Account(Activity.GC, collecting_since_ns)
        return Account(_ACTIVITIES[code], since_ns)


class SharedHeartbeat:
    """A heartbeat in memory that two processes share, which is no file of any directory."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("roseinfer-heartbeat", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self._descriptor = os.dup(file.fileno())
        os.ftruncate(self._descriptor, mmap.PAGESIZE)
        self.heartbeat = _map(self._descriptor)

    def send(self, connection: socket.socket) -> None:
        """Send the descriptor with the first byte of the connection, and close it here."""
        try:
            socket.send_fds(connection, [b"\0"], [self._descriptor])
        finally:
            os.close(self._descriptor)


def receive_heartbeat(connection: socket.socket) -> Heartbeat:
    """Receive what `SharedHeartbeat.send` sent. Raises EOFError when the other side has gone."""
    data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not data or not descriptors:
        raise EOFError
    try:
        return _map(descriptors[0])
    finally:
        os.close(descriptors[0])


def _map(descriptor: int) -> Heartbeat:
    return Heartbeat(memoryview(mmap.mmap(descriptor, mmap.PAGESIZE))[:PAGE_BYTES])
