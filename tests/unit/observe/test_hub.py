"""Each observer hears each fact once and in order; one that fails is dropped, and the others go on."""

import asyncio
import logging
import random

import pytest

from roseinfer.observe.gaps.attribution import Attribution
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.hub import COLUMNS, MAX_ENDS, MAX_STEPS, Hub, Listeners, WriteObserver, Writes
from roseinfer.records import (
    Advanced,
    Arrival,
    Delivery,
    FinishReason,
    LifecycleState,
    Observer,
    RequestTimeline,
    StepRecord,
)
from tests.unit.observe.facts import MS, make_step, make_timeline, writes_of
from tests.unit.observe.gaps.test_request_gaps import US, Bench


def test_columns_hold_what_was_added() -> None:
    timeline = make_timeline(serial=7, write_ns=[63 * MS, 90 * MS])
    writes = writes_of(
        (timeline, Delivery(Arrival(1, 2, 3), 4, 5, 63 * MS, was_paused=False, index=0)),
        (timeline, Delivery(Arrival(11, 12, 13, gc_ns=1), 14, 15, 90 * MS, was_paused=True, index=1)),
        (timeline, Delivery(Arrival(11, 12, 13, was_held=True), 14, 15, 90 * MS, was_paused=False, index=1)),
    )
    rows = zip(*(writes.columns()[name].tolist() for name in COLUMNS), strict=True)
    assert list(rows) == [
        (7, 0, 4, 5, 63 * MS, 0, 1, 2, 3, 0),
        (7, 63 * MS, 14, 15, 90 * MS, 1, 11, 12, 13, 1),
        (7, 63 * MS, 14, 15, 90 * MS, 0, 11, 12, 13, 1),
    ]
    assert not len(writes_of())


def test_a_write_comes_out_as_it_was_added() -> None:
    timeline, other = make_timeline(), make_timeline(serial=1)
    arrivals = [Arrival(1, 2, 3, gc_ns=4), Arrival(11, 12, 13, was_held=True, wait_ns=5)]
    told = [
        (timeline, Delivery(arrivals[0], 4, 5, timeline.write_ns[0], was_paused=False, index=0)),
        (other, Delivery(arrivals[0], 6, 7, other.write_ns[0], was_paused=True, index=0)),
        (timeline, Delivery(arrivals[1], 8, 9, timeline.write_ns[2], was_paused=False, index=2)),
    ]
    for writes in (writes_of(*told), Writes.joined([writes_of(*told[:1]), writes_of(*told[1:])])):
        assert [(writes.timelines[at], writes.delivery(at)) for at in range(len(writes))] == told
        assert writes.columns()["start_ns"].tolist() == [0, 0, timeline.write_ns[1]]


def test_writes_counted_by_columns_are_those_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> dict[Cause, int]:
        bench, numbers = Bench(num_streams=5), random.Random(4)
        for number in range(60):
            way = tuple(numbers.randrange(1, 300) * US for _ in range(4))
            if number % 10 == 5:  # while the step's tokens are on their way
                bench.interrupt(bench.now_ns + 10_300 * US, bench.now_ns + 10_900 * US, Cause.GC)
            bench.step(on_its_way_ns=(way[0], way[1], way[2], way[3]), was_paused=number % 7 == 3)
        return bench.attribution.total_ns

    by_columns = run()
    monkeypatch.setattr(Attribution, "_count_plain", lambda _self, _columns, is_candidate: is_candidate & False)
    assert run() == by_columns
    assert by_columns[Cause.DETOKENIZE]
    assert by_columns[Cause.GC]


class Diary(Observer):
    """Writes down what it is told; fails when told what it is afraid of."""

    def __init__(self, afraid_of: str = "") -> None:
        self.afraid_of = afraid_of
        self.told: list[str] = []

    def _note(self, what: str) -> None:
        self.told.append(what)
        if what == self.afraid_of:
            raise RuntimeError(f"not {what}!")

    def on_lifecycle(self, state: LifecycleState) -> None:
        self._note(state.value)

    def on_start(self, timeline: RequestTimeline) -> None:
        self._note(f"start {timeline.request_id}")

    def on_refusal(self, code: str) -> None:
        self._note(f"refusal {code}")

    def on_step(self, record: StepRecord, advanced: Advanced) -> None:
        self._note(f"step {record.step_id} advanced {len(advanced)}")

    def on_write(self, timeline: RequestTimeline, delivery: Delivery) -> None:
        self._note(f"write {timeline.request_id} at {delivery.written_ns}")

    def on_finish(self, timeline: RequestTimeline) -> None:
        self._note(f"finish {timeline.request_id}")


def tell_all(hub: Hub) -> None:
    timeline = make_timeline()
    hub.on_lifecycle(LifecycleState.READY)
    hub.on_start(timeline)
    hub.on_refusal("overloaded")
    hub.on_step(make_step(step_id=3), Advanced.newest([timeline]))
    hub.on_write(timeline, Delivery(Arrival(1, 2, 3), 4, 5, 6, was_paused=False, index=0))
    hub.on_finish(timeline)


EVERYTHING = ["ready", "start r-1", "refusal overloaded", "step 3 advanced 1", "write r-1 at 6", "finish r-1"]


def test_every_observer_hears_everything_in_order() -> None:
    diaries = [Diary(), Diary()]
    tell_all(Hub(diaries))
    assert [diary.told for diary in diaries] == [EVERYTHING, EVERYTHING]


@pytest.mark.parametrize("fact", EVERYTHING)
def test_an_observer_that_raises_is_dropped_and_logged_once(fact: str, caplog: pytest.LogCaptureFixture) -> None:
    before, failing, after = Diary(), Diary(afraid_of=fact), Diary()
    hub = Hub([before, failing, after])
    with caplog.at_level(logging.ERROR):
        tell_all(hub)
        tell_all(hub)
    assert before.told == after.told == EVERYTHING * 2
    assert failing.told == EVERYTHING[: EVERYTHING.index(fact) + 1]
    [record] = caplog.records
    assert "Diary" in record.getMessage()
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == f"not {fact}!"


def test_a_request_to_stop_is_not_swallowed() -> None:
    class Impatient(Diary):
        def on_start(self, timeline: RequestTimeline) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Hub([Impatient()]).on_start(make_timeline())


class Tally(Diary, WriteObserver):
    """Hears writes together."""

    def on_writes(self, writes: Writes) -> None:
        self._note(f"writes {[writes.delivery(at).encoded_ns for at in range(len(writes))]}")


def step_and_write(hub: Hub, timeline: RequestTimeline, number: int) -> None:
    hub.on_step(make_step(step_id=number), Advanced.newest([timeline]))
    hub.on_write(timeline, Delivery(Arrival(1, 2, 3), 4, number, 6, was_paused=False, index=0))


async def test_steps_and_writes_wait_until_there_are_enough() -> None:
    tally, timeline = Tally(), make_timeline()
    hub = Hub([tally], max_delay_s=60)
    for number in range(MAX_STEPS - 1):
        step_and_write(hub, timeline, number)
    assert tally.told == []
    step_and_write(hub, timeline, MAX_STEPS - 1)
    steps = [told for told in tally.told if told.startswith("step")]
    assert steps == [f"step {number} advanced 1" for number in range(MAX_STEPS)]
    assert tally.told[:3] == ["step 0 advanced 1", "write r-1 at 6", "step 1 advanced 1"]
    assert tally.told[-1] == f"writes {[*range(MAX_STEPS - 1)]}", "all of them together, after the steps"
    hub.catch_up()
    assert tally.told[-1] == f"writes {[MAX_STEPS - 1]}"


async def test_writes_that_came_together_are_delivered_with_the_others_and_one_by_one() -> None:
    tally, timeline = Tally(), make_timeline()
    hub = Hub([tally], max_delay_s=60)
    deliveries = [Delivery(Arrival(1, 2, 3), 4, number, 6, was_paused=False, index=0) for number in range(3)]
    hub.on_writes(writes_of(*((timeline, delivery) for delivery in deliveries[:2])))
    hub.on_writes(writes_of((timeline, deliveries[2])))
    hub.catch_up()
    assert tally.told == ["write r-1 at 6"] * 3 + ["writes [0, 1, 2]"]


async def test_they_do_not_wait_for_long() -> None:
    was_told = asyncio.Event()

    class Bell(Diary):
        def on_step(self, record: StepRecord, advanced: Advanced) -> None:
            was_told.set()

    hub = Hub([Bell()], max_delay_s=0.001)
    step_and_write(hub, make_timeline(), 1)
    assert not was_told.is_set()
    await asyncio.wait_for(was_told.wait(), 10)


async def test_a_write_after_the_last_step_does_not_wait_for_long_either() -> None:
    was_told = asyncio.Event()

    class Bell(Tally):
        def on_writes(self, writes: Writes) -> None:
            was_told.set()

    Hub([Bell()], max_delay_s=0.001).on_write(
        make_timeline(), Delivery(Arrival(1, 2, 3), 4, 5, 6, was_paused=False, index=0)
    )
    await asyncio.wait_for(was_told.wait(), 10)


@pytest.mark.parametrize("fact", ["finish r-1", "ready"])
async def test_what_is_urgent_sends_the_others_first(fact: str) -> None:
    tally, timeline = Tally(), make_timeline(finish_reason=FinishReason.ERROR)
    hub = Hub([tally], max_delay_s=60)
    step_and_write(hub, timeline, 1)
    if fact == "ready":
        hub.on_lifecycle(LifecycleState.READY)
    else:
        hub.on_finish(timeline)
    assert tally.told == ["step 1 advanced 1", "write r-1 at 6", "writes [1]", fact]


async def test_ends_wait_too_and_come_last() -> None:
    tally, timelines = Tally(), [make_timeline(request_id=f"r-{number}") for number in range(MAX_ENDS)]
    hub = Hub([tally], max_delay_s=60)
    for timeline in timelines[:-1]:
        hub.on_finish(timeline)
    step_and_write(hub, timelines[0], 1)
    assert tally.told == []
    hub.on_finish(timelines[-1])
    ends = [f"finish r-{number}" for number in range(MAX_ENDS)]
    assert tally.told == ["step 1 advanced 1", "write r-0 at 6", "writes [1]", *ends]


async def test_an_end_does_not_wait_for_long() -> None:
    was_told = asyncio.Event()

    class Bell(Diary):
        def on_finish(self, timeline: RequestTimeline) -> None:
            was_told.set()

    Hub([Bell()], max_delay_s=0.001).on_finish(make_timeline())
    await asyncio.wait_for(was_told.wait(), 10)


async def test_an_id_that_is_used_again_begins_after_it_has_ended() -> None:
    diary, timeline = Diary(), make_timeline()
    hub = Hub([diary], max_delay_s=60)
    for _ in range(2):
        hub.on_start(timeline)
        hub.on_finish(timeline)
    hub.catch_up()
    assert diary.told == ["start r-1", "finish r-1"] * 2


def test_a_listener_that_raises_is_dropped_and_the_others_hear_on(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []

    def fail(number: int) -> None:
        heard.append(-number)
        raise RuntimeError("not again!")

    listeners: Listeners[int] = Listeners()
    listeners.append(fail)
    listeners.append(heard.append)
    listeners(1)
    listeners(2)
    assert heard == [-1, 1, 2]
    [record] = caplog.records
    assert "fail" in record.getMessage()


def test_nothing_is_gathered_for_nobody() -> None:
    hub = Hub([])
    step_and_write(hub, make_timeline(), 1)
    assert not hub._facts
    assert not hub._timelines
    hub.on_writes(writes_of((make_timeline(), Delivery(Arrival(1, 2, 3), 4, 5, 6, was_paused=False, index=0))))
    assert not hub._writes
