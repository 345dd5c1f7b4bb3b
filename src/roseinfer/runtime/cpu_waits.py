"""Measures how long threads were ready to run and had no core: another process had it, or a CPU quota was used up.

Of an event loop's thread also how long it was stopped for another reason, such as a lock or a page from disk.
"""

import os
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from roseinfer.runtime.cgroup import cpu_groups, throttled_ns

TASKS = Path("/proc/self/task")
_EVERY_NS = 1_000_000  # a look costs two microseconds, so none comes sooner after another
_QUOTA_EVERY_NS = 10_000_000
_NOTED_NS = 500_000  # of a wait: less makes no gap slow
_LOOP_NOTED_NS = 100_000  # a tenth of what may lie between two looks: at least nine tenths of the rest were computing
_SHARE = 0.1  # of the caller's processor time, from which on a thread counts as one that computes


_Events = list[tuple[selectors.SelectorKey, int]]


class Waited(NamedTuple):
    """Nanoseconds without a core since the look before."""

    throttled_ns: int
    waited_ns: int


NOTHING = Waited(0, 0)


class CpuWaits:
    """Reads what the kernel counts for each thread in `schedstat`, and for a control group in `cpu.stat`.

    Where threads compute together, all wait for the one that has no core, so the longest wait counts.
    """

    def __init__(
        self,
        threads: Sequence[int] = (),
        tasks: Path = TASKS,
        groups: Sequence[Path] | None = None,
        noted_ns: int = _NOTED_NS,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Of the calling thread and of `threads`, by their ids. Counts nothing where the system does not.

        Less than `noted_ns` between two looks is no wait.
        """
        self._noted_ns = noted_ns
        self._clock = clock
        own = threading.get_native_id()
        self._files = _open(tasks / str(thread) / "schedstat" for thread in (own, *threads))
        self._stats = _open(group / "cpu.stat" for group in (cpu_groups() if groups is None else groups))
        self._looked_ns = self._read_quota_ns = 0
        self._delays = [_delay_ns(file) for file in self._files]
        self._throttled_ns = self._read_throttled()
        self._late = NOTHING  # what the last look found counted and what passed after its moment

    def look(self, now_ns: int, missing_ns: int = 0) -> Waited:
        """What was waited since the look before; nothing, until the next look, if that was just now.

        A quota may also have stopped a thread that holds a lock which the calling one waits for. So the quota's part is
        as much as it took of `missing_ns`, in which the calling thread did not compute for whatever reason.
        """
        if now_ns - self._looked_ns < _EVERY_NS or not self._files:
            return NOTHING
        self._looked_ns = now_ns
        carried, self._late = self._late, NOTHING
        delay_ns, late_ns = self._read_delay(now_ns, carried.waited_ns)
        missing_ns = max(delay_ns, missing_ns)
        if max(missing_ns, late_ns) < self._noted_ns and now_ns - self._read_quota_ns < _QUOTA_EVERY_NS:
            return NOTHING
        self._read_quota_ns = now_ns
        before, self._throttled_ns = self._throttled_ns, self._read_throttled()
        quota_ns = carried.throttled_ns + self._throttled_ns - before
        missing_ns = missing_ns if missing_ns >= self._noted_ns else 0
        self._late = Waited(min(late_ns, quota_ns), late_ns)
        throttled_ns = min(missing_ns, quota_ns - self._late.throttled_ns)
        return Waited(throttled_ns, max(0, min(delay_ns, missing_ns) - throttled_ns))

    def _read_delay(self, now_ns: int, carried_ns: int) -> tuple[int, int]:
        """How long a thread had no core until `now_ns`, and since.

        The kernel stops a thread on its way out of a system call, so also between that moment and a reading. What it
        counts then belongs to the next look.
        """
        before, self._delays = self._delays, [_delay_ns(file) for file in self._files]
        since_ns = self._clock() - now_ns
        if since_ns >= self._noted_ns:  # a stop on the way out of a reading is counted by now, and not in what was read
            self._delays = [_delay_ns(file) for file in self._files]
        delay_ns = max(now - then for now, then in zip(self._delays, before, strict=True)) + carried_ns
        late_ns = min(delay_ns, since_ns) if since_ns >= self._noted_ns else 0
        return delay_ns - late_ns, late_ns

    def _read_throttled(self) -> int:
        return sum(throttled_ns(_read(file)) for file in self._stats)

    def close(self) -> None:
        while self._files or self._stats:
            os.close((self._files or self._stats).pop())


class Stop(NamedTuple):
    """A while in which an event loop's thread had work and did not compute: first for no reason that is known, then
    because a quota was used up, then because others had the cores; any of the three may have taken no time.
    """

    start_ns: int
    throttled_ns: int  # when each of the other two began
    waited_ns: int
    end_ns: int


class LoopWaits:
    """Calls its listeners with each stop of an event loop's thread.

    Neither the kernel nor the thread's clock says when it was stopped, so a stop is taken to end when it is seen: no
    later than a millisecond of computing afterwards, if `glance` is called as often.
    """

    def __init__(
        self, clock: Callable[[], int] = time.monotonic_ns, cpu_clock: Callable[[], int] = time.thread_time_ns
    ) -> None:
        self.listeners: list[Callable[[Stop], None]] = []
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._waits: CpuWaits | None = None
        self._looked_ns = 0
        self._computed_ns = 0  # by the thread, until then
        self._rested_ns = 0  # since then: it waited for sockets
        self._rest_ns, self._ready_ns = 0, 0  # when it last began to wait for sockets, and when one was ready
        self._delayed_ns = 0  # that the last look found it without a core

    def selector(self) -> selectors.BaseSelector:
        """For the loop that is to be watched; called in its thread."""
        self._waits = CpuWaits(noted_ns=_LOOP_NOTED_NS, clock=self._clock)
        self._looked_ns, self._computed_ns = self._clock(), self._cpu_clock()
        return _WatchedSelector(self)

    def glance(self, now_ns: int) -> None:
        """Looks if the look before is a while ago; called in the loop's thread."""
        if now_ns - self._looked_ns >= _EVERY_NS:
            self.look(now_ns)

    def look(self, now_ns: int) -> None:
        """Looks for a stop; called in the loop's thread."""
        if self._waits is None:
            return
        computed_ns = self._cpu_clock()
        missing_ns = now_ns - self._looked_ns - self._rested_ns - (computed_ns - self._computed_ns)
        throttled_ns, waited_ns = self._waits.look(now_ns, missing_ns)
        self._delayed_ns = throttled_ns + waited_ns
        stopped_ns = missing_ns - throttled_ns - waited_ns
        self._looked_ns, self._computed_ns, self._rested_ns = now_ns, computed_ns, 0
        stopped_ns = stopped_ns if stopped_ns >= _LOOP_NOTED_NS else 0
        if stopped_ns or throttled_ns or waited_ns:
            begun_ns = now_ns - waited_ns - throttled_ns
            self._report(Stop(begun_ns - stopped_ns, begun_ns, now_ns - waited_ns, now_ns))

    def _report(self, stop: Stop) -> None:
        for listener in self.listeners:
            listener(stop)

    def rest(self, select: Callable[[], _Events], timeout: float | None) -> _Events:
        """Looks before and after a wait for sockets, which is no stop; a delay of the waking is one.

        With more to do at once a loop only asks for sockets, as in the turn between reading bytes and handing them on.
        That is no rest, and what was read came in the one before.
        """
        begin_ns = self._clock()
        self.glance(begin_ns)
        if timeout is not None and timeout <= 0:
            return select()
        self._delayed_ns = 0
        try:
            return select()
        finally:
            end_ns = self._clock()
            self._rested_ns += end_ns - begin_ns
            self.glance(end_ns)
            self._rest_ns, self._ready_ns = begin_ns, end_ns - self._delayed_ns

    def note_message(self, sent_ns: int) -> None:
        """Notes a message that has just been read, and the moment with which its sender stamped it.

        While the loop rested the message was not there: its sender had not got so far. That is no work of the loop.
        """
        begin_ns = max(sent_ns, self._rest_ns)
        if self._ready_ns - begin_ns >= _EVERY_NS:
            self._rest_ns = self._ready_ns  # the messages behind it waited meanwhile too
            self._report(Stop(begin_ns, self._ready_ns, self._ready_ns, self._ready_ns))


class _WatchedSelector(selectors.DefaultSelector):
    """One that looks before and after each turn of its loop."""

    def __init__(self, waits: LoopWaits) -> None:
        super().__init__()
        self._waits = waits

    def select(self, timeout: float | None = None) -> _Events:
        return self._waits.rest(partial(super().select, timeout), timeout)


def computing_threads(tasks: Path = TASKS) -> list[int]:
    """The other threads of this process that have computed a good part of what the main one has.

    None for a caller that is not the main thread: in its process others compute for themselves.
    """
    own = threading.get_native_id()
    is_main = threading.current_thread() is threading.main_thread()
    ran_ns = {}
    for task in tasks.iterdir() if is_main and tasks.is_dir() else ():
        try:
            ran_ns[int(task.name)] = int((task / "schedstat").read_bytes().split()[0])
        except OSError:  # it has just ended, or the system counts nothing
            continue
    return sorted(thread for thread, ns in ran_ns.items() if thread != own and ns > _SHARE * ran_ns.get(own, 0))


def _open(paths: Iterable[Path]) -> list[int]:
    """The files that there are."""
    files = []
    for path in paths:
        with suppress(OSError):
            files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    return files


def _read(file: int) -> bytes:
    try:
        return os.pread(file, 512, 0)
    except OSError:  # the thread or the group has ended
        return b""


def _delay_ns(file: int) -> int:
    """The second number: how long the thread was ready and did not run."""
    fields = _read(file).split()
    return int(fields[1]) if len(fields) > 1 else 0
