"""Bounds what long bodies take of the process: the bytes they hold, and the time in which decoding them keeps the GIL.

A body counts from its first byte to the last of its answer: a port may have thousands of connections, each of which
could otherwise keep its two megabytes and all that was made of them.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiohttp import web

from roseinfer.errors import Overloaded

T = TypeVar("T")

_MAX_REST_S = 0.05  # some times what a piece takes; one that took longer was kept from its processor


class BodyBudget:
    """The bytes that all requests of the process may hold together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0  # held now


class HeldBytes:
    """What one request holds of the budget: nothing at first."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Hold at least a number of bytes. Raises Overloaded above the budget, unless no other request holds any."""
        more = num_bytes - self._num_bytes
        if more <= 0:
            return
        of_others = self._budget.num_bytes - self._num_bytes
        if of_others and of_others + num_bytes > self._budget.max_bytes:
            raise Overloaded(f"Bodies of {of_others} bytes are held already; {self._budget.max_bytes} is the limit.")
        self._budget.num_bytes += more
        self._num_bytes = num_bytes

    def release(self) -> None:
        self._budget.num_bytes -= self._num_bytes
        self._num_bytes = 0


HELD_BYTES = web.RequestKey("held_bytes", HeldBytes)


class LongWork:
    """Runs work that keeps the GIL in one thread, which then rests as long as the work took, or _MAX_REST_S.

    The event loop gives the GIL up at every read and write and waits a whole piece of such work to get it back. With
    piece after piece it would wait at each step it takes, the convoy effect of python/cpython issue 52194.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._turn = asyncio.Lock()  # a caller that waits for it can still be cancelled
        self._is_rested_at_s = 0.0

    async def do(self, work: Callable[..., T], *arguments: object) -> T:
        """What the work returns or raises, after all earlier work. It never begins for a caller cancelled before."""
        await self._turn.acquire()
        try:
            await asyncio.sleep(max(0.0, self._is_rested_at_s - time.monotonic()))
            done = asyncio.get_running_loop().run_in_executor(self._thread, self._do, work, *arguments)
        except BaseException:
            self._turn.release()
            raise
        done.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(done)  # a cancelled caller leaves the thread at work, and the next one waits for it

    def _do(self, work: Callable[..., T], *arguments: object) -> T:
        began_s = time.monotonic()
        try:
            return work(*arguments)
        finally:
            ended_s = time.monotonic()
            self._is_rested_at_s = ended_s + min(ended_s - began_s, _MAX_REST_S)

    def close(self) -> None:
        """Begin no more work."""
        self._thread.shutdown(wait=False, cancel_futures=True)
