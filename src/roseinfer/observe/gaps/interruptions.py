"""What interrupts the front end: hears collections and stops of its event loop, and finds those within an interval."""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from roseinfer.observe.gaps.causes import Cause
from roseinfer.runtime.cpu_waits import LoopWaits, Stop
from roseinfer.runtime.gc_pauses import GcPauses

Interruption = tuple[int, int, Cause]
"""When it began, when it was over, and whether it was a collection, a scrape, or a wait for a core."""

Note = Callable[[Cause, int, int], None]
"""Called with the cause, the begin and the end of an interruption; in any thread, also by the garbage collector."""

_MAX_INTERRUPTIONS = 512
_NEVER_NS = 1 << 63


class LiveInterruptions:
    """The newest interruptions of a running server. Any thread may report them, also the garbage collector."""

    def __init__(self) -> None:
        self._known: deque[Interruption] = deque(maxlen=_MAX_INTERRUPTIONS)  # in the order of reports
        self._under_way: set[tuple[int, Cause]] = set()  # since when
        self._last_end_ns = 0
        self._newest_report = object()
        # What the last question found, from which moment on, and the newest report then: hundreds of writes ask for
        # moments of one turn of the loop.
        self._found, self._found_from_ns, self._found_at = RecordedInterruptions(()), 0, self._newest_report

    def begin(self, start_ns: int, cause: Cause) -> None:
        """Notes one that has begun: until `add` ends it, every moment from here on belongs to it."""
        self._under_way.add((start_ns, cause))
        self._newest_report = object()

    def add(self, start_ns: int, end_ns: int, cause: Cause) -> None:
        """Notes one that is over."""
        self._known.append((start_ns, end_ns, cause))
        # In this order: at no moment may another thread find it neither under way nor over.
        self._last_end_ns = max(self._last_end_ns, end_ns)
        self._under_way.discard((start_ns, cause))
        self._newest_report = object()

    @property
    def quiet_since_ns(self) -> float:
        """The moment from which on nothing was interrupted; infinite while something is."""
        return math.inf if self._under_way else self._last_end_ns

    def within(self, start_ns: int, end_ns: int) -> Sequence[Interruption]:
        """Returns those that overlap the interval, cut to it, in the order of time, with no moment in two of them."""
        if start_ns >= self.quiet_since_ns:
            return ()
        if self._found_at is not self._newest_report or start_ns < self._found_from_ns:
            self._found_from_ns, self._found_at = start_ns, self._newest_report
            # Copies, since another one may come meanwhile. Lists: to make a tuple may collect garbage while it reads,
            # and the collector reports here.
            found = [(begin, _NEVER_NS, cause) for begin, cause in list(self._under_way)]
            found += [interruption for interruption in list(self._known) if interruption[1] > start_ns]
            self._found = RecordedInterruptions(found)
        return self._found.within(start_ns, end_ns)


class RecordedInterruptions:
    """The interruptions of a recording."""

    def __init__(self, known: Iterable[Interruption]) -> None:
        self._apart = apart(known)
        self._ends = [end for _, end, _ in self._apart]

    def within(self, start_ns: int, end_ns: int) -> Sequence[Interruption]:
        """See LiveInterruptions."""
        first = last = bisect_right(self._ends, start_ns)
        while last < len(self._apart) and self._apart[last][0] < end_ns:
            last += 1
        return _cut(self._apart[first:last], start_ns, end_ns)


def apart(known: Iterable[Interruption]) -> list[Interruption]:
    """Returns interruptions in the order of time of which no two overlap.

    What began later takes its time from the one around it: a collection stops a scrape too.
    """
    pieces: list[Interruption] = []
    for begin, end, cause in sorted(known):
        around: list[Interruption] = []
        while pieces and pieces[-1][1] > begin:
            around.append(pieces.pop())
        around.reverse()
        pieces += [(first, begin, outer) for first, _, outer in around if first < begin]
        if end > begin:
            pieces.append((begin, end, cause))
        pieces += [(max(first, end), last, outer) for first, last, outer in around if last > end]
    return pieces


def _cut(pieces: Iterable[Interruption], start_ns: int, end_ns: int) -> list[Interruption]:
    return [
        (max(begin, start_ns), min(end, end_ns), cause)
        for begin, end, cause in pieces
        if end > start_ns and begin < end_ns
    ]


def hear_interruptions(gc_pauses: GcPauses, loop_waits: LoopWaits, known: LiveInterruptions, note: Note) -> None:
    """Has each noted, and adds it to those that are `known`: what one explains is no stop for an unknown reason."""

    def add(cause: Cause, start_ns: int, end_ns: int) -> None:
        note(cause, start_ns, end_ns)
        known.add(start_ns, end_ns, cause)

    def add_stop(stop: Stop) -> None:
        others = known.within(stop.start_ns, stop.throttled_ns)  # a scrape in another thread, say
        begins = (stop.start_ns, *(end_ns for _, end_ns, _ in others))
        ends = (*(start_ns for start_ns, _, _ in others), stop.throttled_ns)
        for cause, start_ns, end_ns in (
            *((Cause.UNKNOWN, start_ns, end_ns) for start_ns, end_ns in zip(begins, ends, strict=True)),
            (Cause.CPU_THROTTLED, stop.throttled_ns, stop.waited_ns),
            (Cause.CPU_WAIT, stop.waited_ns, stop.end_ns),
        ):
            if start_ns < end_ns:
                add(cause, start_ns, end_ns)

    gc_pauses.listeners.append(partial(add, Cause.GC))
    loop_waits.listeners.append(add_stop)
