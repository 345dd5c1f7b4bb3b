"""A signal that comes while an event loop runs ends it in order, and means afterwards what it means elsewhere."""

import asyncio
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from roseinfer.runtime.interrupts import run_until_signal


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal whose handler raises, as those of the command do."""

    def unwind(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(request.param, unwind)
    yield request.param
    signal.signal(request.param, before)


def test_the_result_is_the_coroutines() -> None:
    async def work() -> int:
        return 3

    before = signal.getsignal(signal.SIGINT)
    assert run_until_signal(work()) == 3
    assert signal.getsignal(signal.SIGINT) == before


def test_a_signal_loses_no_wake_up_of_any_task(number: signal.Signals) -> None:
    """It comes twice, each time in a callback, behind which others of that turn wait."""
    num_ended = 0

    async def wait(woken: asyncio.Event) -> None:
        nonlocal num_ended
        try:
            await woken.wait()
            signal.raise_signal(number)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            num_ended += 1

    async def work() -> None:
        woken = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(wait(woken))
            await asyncio.sleep(0)
            woken.set()

    handler = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught:
        run_until_signal(work())
    assert (caught.value.code, num_ended) == (128 + number, 2)
    assert signal.getsignal(number) is handler


def test_a_signal_that_is_ignored_stays_so(number: signal.Signals) -> None:
    async def work() -> str:
        signal.raise_signal(number)
        await asyncio.sleep(0)
        return "done"

    signal.signal(number, signal.SIG_IGN)
    assert run_until_signal(work()) == "done"
    assert signal.getsignal(number) == signal.SIG_IGN
