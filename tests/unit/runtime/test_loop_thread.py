"""A loop in a thread: what other threads give it is done or refused, also at its end, and no caller waits for ever."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future

import pytest

from roseinfer.errors import EngineDead
from roseinfer.runtime.loop_thread import LoopThread
from tests.background import in_background


async def nothing() -> None:
    """There is nothing to do at the end."""


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test")
    yield loop
    if loop.shut():
        loop.stop(nothing)
        loop.close()


def end(loop: LoopThread) -> None:
    loop.shut()
    loop.stop(nothing)
    loop.close()


async def echo(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def fail() -> None:
    raise ZeroDivisionError


def test_who_calls_has_the_result_or_the_exception(loop: LoopThread) -> None:
    assert loop.call(echo(5)) == 5
    assert loop.begin(echo(6)).result(10) == 6
    with pytest.raises(ZeroDivisionError):
        loop.call(fail())
    seen = threading.Event()
    loop.post(seen.set)
    assert seen.wait(10)


def test_what_runs_when_it_stops_is_cancelled_and_has_ended_before_the_last_thing(loop: LoopThread) -> None:
    order: list[str] = []
    begun = threading.Event()

    async def wait_for_ever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            order.append("cancelled")

    async def last() -> None:
        order.append("last")

    waiting = in_background(lambda: loop.call(wait_for_ever()))
    assert begun.wait(10)
    assert loop.shut()
    loop.stop(last)
    with pytest.raises(EngineDead, match="was stopped"):
        waiting.result(10)
    assert order == ["cancelled", "last"]
    loop.close()


def test_who_comes_later_is_refused(loop: LoopThread) -> None:
    before = set(threading.enumerate())
    end(loop)
    assert not loop.shut()
    for ask in (lambda: loop.call(echo(1)), lambda: loop.begin(echo(1))):
        with pytest.raises(EngineDead, match="was stopped"):
            ask()
    loop.post(pytest.fail, "it runs nothing any more")
    assert len(before - set(threading.enumerate())) == 1, "its thread has ended"


def test_an_interrupt_of_who_waits_cancels_it(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def wait_for_ever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    begin: Callable[..., object] = loop.begin

    class Interrupted:
        """What `begin` returns; Ctrl-C comes while it is waited for."""

        def __init__(self, future: object) -> None:
            self._future = future

        def result(self) -> None:
            assert begun.wait(10)
            raise KeyboardInterrupt

        def cancel(self) -> None:
            self._future.cancel()  # type: ignore[attr-defined]

    monkeypatch.setattr(loop, "begin", lambda coroutine: Interrupted(begin(coroutine)))
    with pytest.raises(KeyboardInterrupt):
        loop.call(wait_for_ever())
    assert ended.wait(10)


def test_an_interrupt_of_the_stop_leaves_nothing_behind(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, order = asyncio.run_coroutine_threadsafe, list[str]()
    is_interrupted = threading.Event()

    async def last() -> None:
        await asyncio.to_thread(is_interrupted.wait, 10)
        order.append("last")

    class Interrupted(Future[None]):
        """Ctrl-C comes while its result is waited for."""

        def result(self, timeout: float | None = None) -> None:
            if is_interrupted.is_set():
                return super().result(timeout)
            is_interrupted.set()
            raise KeyboardInterrupt

    def begin_and_interrupt(coroutine: Coroutine[None, None, None], on: asyncio.AbstractEventLoop) -> "Future[None]":
        future = Interrupted()
        begin(coroutine, on).add_done_callback(lambda done: future.set_result(done.result()))
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", begin_and_interrupt)
    assert loop.shut()
    with pytest.raises(KeyboardInterrupt):
        loop.stop(last)
    assert order == ["last"]
    loop.close()


@pytest.mark.parametrize("attempt", range(20))
def test_no_caller_waits_for_ever_whenever_the_loop_ends(attempt: int) -> None:
    """Threads that call without a rest while the loop ends: each hears of the end, and of nothing else."""
    loop, num_threads = LoopThread("test"), 4
    have_begun = threading.Barrier(num_threads + 1)

    def call_until_the_end() -> None:
        have_begun.wait(10)
        while True:
            assert loop.call(echo(1)) == 1
            loop.post(int)

    callers = [in_background(call_until_the_end) for _ in range(num_threads)]
    have_begun.wait(10)
    time.sleep(attempt / 5000)
    end(loop)
    for caller in callers:
        with pytest.raises(EngineDead):
            caller.result(10)
