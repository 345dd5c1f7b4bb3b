"""Runs an event loop in a thread of its own, and takes work for it from other threads.

The door for work is shut before the loop ends, and work that came through it is ended first, so no caller waits for a
coroutine that never runs.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar
from weakref import WeakSet

from roseinfer.errors import EngineDead

T = TypeVar("T")


class LoopThread:
    """An event loop that runs until `close`. Its public methods are for other threads than its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._begun = WeakSet[Coroutine[Any, Any, Any]]()  # given to `begin`; one leaves when it has ended
        self._door = threading.RLock()  # re-entered by `post` when a garbage collection ends a generator
        self._is_shut = False
        self._refusal = "The engine was stopped."
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. Raises EngineDead once the door is shut."""
        with self._door:
            if not self._is_shut:
                self._begun.add(coroutine)
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise EngineDead(self._refusal)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it; an interrupt of the waiting thread cancels it.

        Raises what it raises, EngineDead when the door is shut before its end, and what `check_can_wait` does.
        """
        try:
            self.check_can_wait()
        except RuntimeError:
            coroutine.close()
            raise
        try:
            return _wait(self.begin(coroutine))
        except CancelledError:
            raise EngineDead(self._refusal) from None

    def check_can_wait(self) -> None:
        """Raises RuntimeError on the loop's own thread, which would wait for itself for ever."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("an observer's method waits for its own thread: make this call in another one")

    def post(self, callback: Callable[..., object], *arguments: object) -> None:
        """Call a function on the loop soon; not at all once the door is shut."""
        with self._door:
            if not self._is_shut:
                self._loop.call_soon_threadsafe(callback, *arguments)

    def shut(self) -> bool:
        """Refuse all further work. Whether this call shut the door."""
        with self._door:
            was_open, self._is_shut = not self._is_shut, True
        return was_open

    def disown(self, refusal: str) -> None:
        """Refuse all work, in a process that was forked: the thread runs in its parent alone."""
        self._door = threading.RLock()  # another thread may have held it when this process was forked
        self._is_shut, self._refusal = True, refusal

    def stop(self, last: Callable[[], Awaitable[None]]) -> None:
        """Shut the door, cancel what `begin` began, wait until it has ended, and run `last`.

        What `last` ends must not be left behind, so an interrupt of the waiting thread is raised when all is done; a
        second one is raised at once.
        """
        self.shut()
        stopping = asyncio.run_coroutine_threadsafe(self._stop(last), self._loop)
        try:
            stopping.result()
        except BaseException:
            _wait(stopping)
            raise

    def close(self) -> None:
        """End the loop and join its thread; call `stop` first, since running tasks are left as they are."""
        self.shut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- on the loop ------------------------------------------------------------------------------------------------

    async def _stop(self, last: Callable[[], Awaitable[None]]) -> None:
        # All that came through the door has begun by now: the loop runs callbacks in their order.
        tasks = [task for task in asyncio.all_tasks() if task.get_coro() in self._begun]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await last()


def _wait(future: Future[T]) -> T:
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
