"""The pacer, checked against a clock of its own."""

import asyncio

from roseinfer.bench.load.client import Pacer


def test_the_pacer_waits_for_each_request_and_a_late_one_goes_at_once() -> None:
    """It oversleeps once; what was due in the meantime is late by as much as is left, and nothing drifts."""
    now, slept = [0], list[float]()
    oversleeps = iter([0, 25_000_000, 0])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += round(seconds * 1e9) + next(oversleeps)

    async def launches() -> list[tuple[int, int]]:
        launched: list[tuple[int, int]] = []
        done = asyncio.Event()

        def launch(index: int, due_ns: int) -> None:
            launched.append((index, due_ns))
            if index == 3:
                done.set()

        Pacer(lambda: now[0], sleep).start([10_000_000 * (index + 1) for index in range(4)], launch)
        await done.wait()
        return launched

    assert asyncio.run(launches()) == [(index, 10_000_000 * (index + 1)) for index in range(4)]
    assert slept == [0.01, 0.01], "the third and the fourth were due while it overslept"
    assert now[0] == 45_000_000
