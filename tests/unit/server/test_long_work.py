"""Work beside the event loop: in order, with rests, and with its errors."""

import asyncio
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from roseinfer.server import long_work
from roseinfer.server.long_work import LongWork, give_way


async def test_pieces_are_done_one_at_a_time_and_in_order() -> None:
    work, running, order = LongWork("test"), threading.Semaphore(1), []

    def note(number: int) -> int:
        assert running.acquire(blocking=False), "two at a time"
        time.sleep(0.001)
        order.append(number)
        running.release()
        return number

    assert await asyncio.gather(*(work.do(note, number) for number in range(5))) == [0, 1, 2, 3, 4]
    assert order == [0, 1, 2, 3, 4]


async def test_before_the_next_piece_it_rests_as_long_as_the_last_one_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(long_work, "time", clock)
    work = LongWork("test")
    await work.do(clock.sleep, 3.0)
    assert clock.slept_s == [0.0, 3.0]  # the first rests not at all
    clock.now_s += 1.0  # nothing was asked for meanwhile, which counts as rest
    await work.do(clock.sleep, 5.0)
    assert clock.slept_s[2:] == [2.0, 5.0]
    clock.now_s += 60.0
    await work.do(clock.sleep, 1.0)
    assert clock.slept_s[4:] == [0.0, 1.0]


async def test_a_piece_that_fails_is_told_of_and_rested_from(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(long_work, "time", clock)
    work = LongWork("test")

    def fail() -> None:
        clock.sleep(3.0)
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        await work.do(fail)
    await work.do(clock.sleep, 0.0)
    assert clock.slept_s == [0.0, 3.0, 3.0, 0.0]


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no priority of its own")
def test_a_thread_that_gives_way_leaves_the_others_their_priority() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    with ThreadPoolExecutor(1, initializer=give_way) as pool:
        assert pool.submit(niceness).result() == min(19, before + 10)
    assert niceness() == before


class Clock:
    """Stands for the module `time`: sleeping moves it on."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds
