"""Work beside the event loop: in order, with rests, with its errors, and not for those who have gone."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from roseinfer.server.connection import body_budget
from roseinfer.server.connection.body_budget import LongWork


@pytest.fixture
def work() -> Iterator[LongWork]:
    work = LongWork("test")
    yield work
    work.close()


class Clock:
    """Stands for the module `time`; sleeping moves it on."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.rests_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> None:
        self.now_s += seconds

    async def rest(self, seconds: float) -> None:
        self.rests_s.append(round(seconds, 6))
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(body_budget, "time", clock)
    monkeypatch.setattr(asyncio, "sleep", clock.rest)
    return clock


async def test_pieces_are_done_one_at_a_time_and_in_order(work: LongWork) -> None:
    running, order = threading.Semaphore(1), []

    def note(number: int) -> int:
        assert running.acquire(blocking=False), "two at a time"
        time.sleep(0.001)
        order.append(number)
        running.release()
        return number

    assert await asyncio.gather(*(work.do(note, number) for number in range(5))) == [0, 1, 2, 3, 4]
    assert order == [0, 1, 2, 3, 4]


async def test_before_the_next_piece_it_rests_as_long_as_the_last_one_took(work: LongWork, clock: Clock) -> None:
    await work.do(clock.work, 0.03)
    assert clock.rests_s == [0.0]  # the first rests not at all
    clock.now_s += 0.01  # nothing was asked for meanwhile, which counts as rest
    await work.do(clock.work, 0.02)
    clock.now_s += 60.0
    await work.do(clock.work, 0.01)
    assert clock.rests_s == [0.0, 0.02, 0.0]


async def test_a_piece_that_was_stopped_for_long_is_not_rested_from_as_long(work: LongWork, clock: Clock) -> None:
    await work.do(clock.work, 4.0)
    await work.do(clock.work, 0.0)
    assert clock.rests_s == [0.0, 0.05]


async def test_a_piece_that_fails_is_logged_and_rested_from(work: LongWork, clock: Clock) -> None:
    def fail() -> None:
        clock.work(0.03)
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        await work.do(fail)
    await work.do(clock.work, 0.0)
    assert clock.rests_s == [0.0, 0.03]


async def test_what_nobody_waits_for_any_more_is_not_begun(work: LongWork) -> None:
    has_begun, may_end, begun = threading.Event(), threading.Event(), []

    def piece(number: int) -> None:
        begun.append(number)
        has_begun.set()
        may_end.wait(10)

    pieces = [asyncio.create_task(work.do(piece, number)) for number in range(3)]
    await asyncio.to_thread(has_begun.wait, 10)
    pieces[1].cancel()
    may_end.set()
    await asyncio.gather(*pieces, return_exceptions=True)
    assert begun == [0, 2]


async def test_who_leaves_while_a_piece_is_done_leaves_the_rest_to_the_next(work: LongWork) -> None:
    has_begun, may_end, ended_s = threading.Event(), threading.Event(), []

    def first() -> None:
        has_begun.set()
        may_end.wait(10)
        time.sleep(0.02)
        ended_s.append(time.monotonic())
        raise ValueError("nobody hears of it")

    leaving = asyncio.create_task(work.do(first))
    await asyncio.to_thread(has_begun.wait, 10)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    following = asyncio.create_task(work.do(time.monotonic))
    may_end.set()
    assert await following - ended_s[0] >= 0.02
