"""Runs work that keeps the GIL for long beside the event loop, which gets its share of it. Knows no work."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_MAX_REST_S = 0.05  # some times what a piece takes; one that took longer was kept from its processor


class LongWork:
    """One thread, which rests before its next piece of work as long as the last one took, or _MAX_REST_S.

    The event loop gives the GIL up at every read and write, and waits a whole call of such work to get it back: with
    piece after piece it would wait so at each step it takes, the convoy effect of python/cpython issue 52194.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._turn = asyncio.Lock()  # who waits for it can still go away
        self._is_rested_at_s = 0.0

    async def do(self, work: Callable[..., T], *arguments: object) -> T:
        """What the work returns or raises, after all that was asked for before. Never begun, if cancelled before."""
        await self._turn.acquire()
        try:
            await asyncio.sleep(max(0.0, self._is_rested_at_s - time.monotonic()))
            done = asyncio.get_running_loop().run_in_executor(self._thread, self._do, work, *arguments)
        except BaseException:
            self._turn.release()
            raise
        done.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(done)  # whoever goes away leaves the thread at work, and the next one waits for it

    def _do(self, work: Callable[..., T], *arguments: object) -> T:
        began_s = time.monotonic()
        try:
            return work(*arguments)
        finally:
            ended_s = time.monotonic()
            self._is_rested_at_s = ended_s + min(ended_s - began_s, _MAX_REST_S)

    def close(self) -> None:
        """Begin nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
