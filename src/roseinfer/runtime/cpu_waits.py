"""Measures how long threads were ready to run and had no core: another process had it, or a CPU quota was used up."""

import os
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from roseinfer.runtime.cgroup import cpu_groups, throttled_ns

TASKS = Path("/proc/self/task")
_EVERY_NS = 1_000_000  # a look costs two microseconds, so none comes sooner after another
_QUOTA_EVERY_NS = 10_000_000
_NOTED_NS = 500_000  # of a wait: less makes no gap slow
_SHARE = 0.1  # of the caller's processor time, from which on a thread counts as one that computes


class Waited(NamedTuple):
    """Nanoseconds without a core since the look before."""

    throttled_ns: int
    waited_ns: int


NOTHING = Waited(0, 0)


class CpuWaits:
    """Reads what the kernel counts for each thread in `schedstat`, and for a control group in `cpu.stat`.

    Where threads compute together, all wait for the one that has no core, so the longest wait counts.
    """

    def __init__(self, threads: Sequence[int] = (), tasks: Path = TASKS, groups: Sequence[Path] | None = None) -> None:
        """Of the calling thread and of `threads`, by their ids. Counts nothing where the system does not."""
        own = threading.get_native_id()
        self._files = _open(tasks / str(thread) / "schedstat" for thread in (own, *threads))
        self._stats = _open(group / "cpu.stat" for group in (cpu_groups() if groups is None else groups))
        self._looked_ns = self._read_quota_ns = 0
        self._delays = [_delay_ns(file) for file in self._files]
        self._throttled_ns = self._read_throttled()

    def look(self, now_ns: int) -> Waited:
        """What was waited since the look before; nothing, until the next look, if that was just now."""
        if now_ns - self._looked_ns < _EVERY_NS or not self._files:
            return NOTHING
        self._looked_ns = now_ns
        before, self._delays = self._delays, [_delay_ns(file) for file in self._files]
        delay_ns = max(now - then for now, then in zip(self._delays, before, strict=True))
        if delay_ns < _NOTED_NS and now_ns - self._read_quota_ns < _QUOTA_EVERY_NS:
            return NOTHING
        self._read_quota_ns = now_ns
        throttled_before, self._throttled_ns = self._throttled_ns, self._read_throttled()
        if delay_ns < _NOTED_NS:
            return NOTHING
        throttled = min(delay_ns, self._throttled_ns - throttled_before)
        return Waited(throttled, delay_ns - throttled)

    def _read_throttled(self) -> int:
        return sum(throttled_ns(_read(file)) for file in self._stats)

    def close(self) -> None:
        while self._files or self._stats:
            os.close((self._files or self._stats).pop())


class LoopWaits:
    """Calls its listeners with each wait of an event loop's thread: when it began, when what a quota took of it was
    over, and when it ended. The kernel does not say when a thread waited, so a wait is taken to end when it is seen.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.listeners: list[Callable[[int, int, int], None]] = []
        self._clock = clock
        self._waits: CpuWaits | None = None

    def selector(self) -> selectors.BaseSelector:
        """For the loop that is to be watched; called in its thread."""
        self._waits = CpuWaits()
        return _WatchedSelector(self.look)

    def look(self) -> None:
        """Looks for a wait; called in the loop's thread."""
        if self._waits is None:
            return
        now_ns = self._clock()
        throttled_ns, waited_ns = self._waits.look(now_ns)
        if throttled_ns or waited_ns:
            for listener in self.listeners:
                listener(now_ns - waited_ns - throttled_ns, now_ns - waited_ns, now_ns)


class _WatchedSelector(selectors.DefaultSelector):
    """One that looks before and after each turn of its loop."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._look()
        events = super().select(timeout)
        self._look()
        return events


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
