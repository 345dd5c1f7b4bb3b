"""Runs work that takes long beside the event loop, which keeps its share of the interpreter. Knows no work."""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_NICENESS = 10  # a tenth of the weight of other threads, by the table in the kernel's kernel/sched/core.c


class LongWork:
    """One thread for work that keeps the GIL; before the next piece it rests as long as the last one took.

    The event loop gives the GIL up at every read and write, and waits a whole call of such work to get it back: with
    piece after piece it would wait so at each step it takes, the convoy effect of python/cpython issue 52194.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._is_rested_at_s = 0.0

    async def do(self, work: Callable[..., T], *arguments: object) -> T:
        """What the work returns or raises, after all that was asked for before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._do, work, *arguments)

    def _do(self, work: Callable[..., T], *arguments: object) -> T:
        time.sleep(max(0.0, self._is_rested_at_s - time.monotonic()))
        began_s = time.monotonic()
        try:
            return work(*arguments)
        finally:
            ended_s = time.monotonic()
            self._is_rested_at_s = ended_s + (ended_s - began_s)


def give_way() -> None:
    """Let other threads have the processor first where there are too few: for a thread without the GIL.

    With the GIL it would keep the event loop waiting until it is its own turn.
    """
    if sys.platform == "linux":  # elsewhere it would be the whole process
        os.nice(_NICENESS)
