"""Closes each `LLM` that the program has not: when nothing refers to it, or Python ends. A fork lets go of them all."""

import os
import threading
import weakref
from contextlib import ExitStack

from roseinfer.errors import EngineDead
from roseinfer.llm.streams import Streams
from roseinfer.runtime.loop_thread import LoopThread

# What closes each one that is open, and what of it a forked process must let go; none of it refers to the LLM.
_open: dict[ExitStack, tuple[LoopThread, Streams]] = {}
_closers: list[threading.Thread] = []  # of LLMs that were let go


def close_in_the_end(llm: object, undo: ExitStack, loop: LoopThread, streams: Streams) -> None:
    """Have `close` called when nothing refers to the LLM, or Python ends."""
    _open[undo] = loop, streams
    weakref.finalize(llm, _close_soon, undo).atexit = False


def close(undo: ExitStack) -> None:
    """Run what closes an LLM, once."""
    loop, _ = _open.pop(undo, (None, None))
    if loop is not None and loop.shut():
        undo.close()


def _close_soon(undo: ExitStack) -> None:
    """Close an LLM that nothing refers to: in a thread, since a collection may be any thread's, its loop's too."""
    if undo in _open:
        closer = threading.Thread(target=close, args=[undo], name="llm-close", daemon=True)
        _closers[:] = [*filter(threading.Thread.is_alive, _closers), closer]
        closer.start()


def _close_all() -> None:
    """Close what the program has not. `atexit` comes when thread pools have ended, which closing needs."""
    for undo in list(_open):
        close(undo)
    for closer in _closers:
        closer.join()


def _leave_to_parent() -> None:
    """In a process that was forked, refuse calls that would wait for the loops, which run in the parent alone."""
    refusal = "The engine belongs to the process that this one was forked from."
    for loop, streams in _open.values():
        loop.disown(refusal)
        streams.end_all(EngineDead(refusal))
    _open.clear()


threading._register_atexit(_close_all)  # type: ignore[attr-defined]  # noqa: SLF001 - as concurrent.futures does
os.register_at_fork(after_in_child=_leave_to_parent)
