"""Hears what interrupts the front end: garbage collections, and stops of its event loop."""

from collections.abc import Callable
from functools import partial

from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.deliveries import LiveInterruptions
from roseinfer.runtime.cpu_waits import LoopWaits, Stop
from roseinfer.runtime.gc_pauses import GcPauses

Note = Callable[[Cause, int, int], None]
"""Called with the cause, the begin and the end of an interruption; in any thread, also by the garbage collector."""


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
