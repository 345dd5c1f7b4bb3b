"""Lowers the scheduling priority of this process or thread.

`python -m roseinfer.runtime.niceness INCREMENT MODULE` lowers it before it runs the module, as a child of the process
that started it: one that did so after its imports would have taken a core for a second by then, from that process.
"""

import contextlib
import os
import runpy
import sys
from pathlib import Path

# How much nicer than the engine a front end is: the engine's threads wait for each other many times in a step, and a
# front end that takes the core of one stops them all.
FRONT_END_NICENESS = 5
TELEMETRY_NICENESS = 10  # no request waits for it
_SESSION_GROUP = Path("/proc/self/autogroup")


def be_nicer(increment: int, session_group: Path = _SESSION_GROUP) -> None:
    """Let the processes that were started before go first, by a number of levels of nice(2).

    Linux may weigh sessions against each other, and nice values then count inside one only (autogroup, sched(7)). So a
    process that leads a session makes that nicer too. One that shares its session, say with a shell, leaves it alone.
    """
    if not increment:
        return
    os.nice(increment)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # no such file where sessions are not weighed
            session_group.write_text(str(os.nice(0)))


def take_turns() -> None:
    """Let a process that runs go on when this one wakes, to the end of its time slice."""
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def be_nicer_in_this_thread(increment: int) -> None:
    """Let the other threads go first where processors are too few.

    Not for a thread that needs the GIL: it would keep all others waiting until its own turn comes.
    """
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.nice(increment)


if __name__ == "__main__":
    be_nicer(int(sys.argv[1]))
    from roseinfer.runtime.child_process import live_as_child

    live_as_child()  # else what it computes for ever would outlive a parent that is killed
    runpy.run_module(sys.argv[2], run_name="__main__")
