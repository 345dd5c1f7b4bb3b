"""When requests are submitted, on a clock that the test moves."""

from collections.abc import Sequence
from typing import Any

import pytest

from roseinfer.bench.seeds.runs import Schedule, run_online
from roseinfer.errors import Overloaded
from roseinfer.llm.llm import Completion
from roseinfer.messages import SamplingParams
from roseinfer.records import FinishReason, RequestTimeline

MS = 1_000_000


class FakeTime:
    """A clock that stands still unless somebody sleeps or works."""

    def __init__(self) -> None:
        self.now = 1_000 * MS

    def clock(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


class SlowLLM:
    """Each submission takes as many milliseconds as the list says; None refuses it after 1 ms."""

    def __init__(self, time: FakeTime, durations_ms: Sequence[int | None]) -> None:
        self._time = time
        self._durations = iter(durations_ms)
        self._timelines: dict[str, RequestTimeline] = {}

    def submit(self, prompt: Any, params: SamplingParams, *, cache_salt: str) -> str:
        duration = next(self._durations)
        self._time.now += (duration or 1) * MS
        if duration is None:
            raise Overloaded("full")
        now, request_id = self._time.now, f"{prompt}-{cache_salt}"
        self._timelines[request_id] = RequestTimeline(
            request_id=request_id, recv_ns=now, tokenized_ns=now, inbox_ns=now, scheduled_ns=now, token_ns=[now],
            end_ns=now, finish_reason=FinishReason.LENGTH,
        )  # fmt: skip
        return request_id

    def result(self, request_id: str) -> Completion:
        return Completion("", [0], FinishReason.LENGTH, self._timelines.pop(request_id))


@pytest.mark.parametrize(
    ("interval_ms", "is_absolute", "starts_ms", "lags_ms", "wall_ms"),
    [
        (20, True, [0, 30, 40, 60], [0, 10, 0, 0], 61),  # the slow first call delays the second request alone
        (20, False, [0, 50, 71, 92], [None] * 4, 113),  # and here everything after it
        (0, True, [0, 30, 31, 32], [None] * 4, 33),  # a burst has no due times, so it cannot be late
    ],
)
def test_the_schedule(
    interval_ms: int, is_absolute: bool, starts_ms: list[int], lags_ms: list[int | None], wall_ms: int
) -> None:
    time = FakeTime()
    start = time.now
    schedule = Schedule(interval_ms * MS, is_absolute=is_absolute, clock=time.clock, sleep=time.sleep)
    llm: Any = SlowLLM(time, [30, 1, 1, 1])
    run = run_online(llm, ["a", "b", "c", "d"], SamplingParams(), schedule, "salt")
    assert [(times.submit_start - start) / MS for times in run.requests] == starts_ms
    targets = [start + i * interval_ms * MS if is_absolute and interval_ms else None for i in range(4)]
    assert [times.target for times in run.requests] == targets
    lags = [None if times.target is None else (times.submit_start - times.target) / MS for times in run.requests]
    assert lags == lags_ms
    assert run.submit_wall == wall_ms * MS
    assert [times.submit_end - times.submit_start for times in run.requests] == [30 * MS, MS, MS, MS]


def test_refused_requests_are_counted_apart() -> None:
    time = FakeTime()
    schedule = Schedule(0, clock=time.clock, sleep=time.sleep)
    llm: Any = SlowLLM(time, [1, None, 1, None])
    run = run_online(llm, ["a", "b", "c", "d"], SamplingParams(), schedule)
    assert len(run.requests) == 2
    assert run.rejected == [MS, MS]
