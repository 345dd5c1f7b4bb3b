"""Runs a coroutine on an event loop of its own, which a signal ends in order.

A handler that raises does so in the middle of a turn of the loop. That loses what the turn had yet to do, such as
waking a task, and the end of the loop then waits for that task for ever.
"""

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_until_signal(coroutine: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`; but a signal that has a handler cancels the coroutine, and the handler runs after the loop."""
    is_main = threading.current_thread() is threading.main_thread()
    found = {number: signal.getsignal(number) for number in (_NUMBERS if is_main else ())}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}  # `nohup` has one ignored
    came: list[signal.Signals] = []

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None

        def cancel(number: signal.Signals) -> None:
            came.append(number)
            task.cancel()

        for number in handlers:
            asyncio.get_running_loop().add_signal_handler(number, cancel, number)
        return await coroutine

    try:
        return asyncio.run(run())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            handlers[came[0]](came[0], None)
