"""Interruptions may be told while they are read, by another thread or by a collection that the reading causes."""

import gc
from collections.abc import Iterator
from random import Random

import pytest

from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.deliveries import delivery_segments
from roseinfer.observe.gaps.interruptions import LiveInterruptions
from roseinfer.records import Arrival, Delivery
from roseinfer.runtime.gc_pauses import GcPauses

MS = 1_000_000


@pytest.fixture
def _collecting_always() -> Iterator[None]:
    """A collection at each allocation of anything that it walks through."""
    thresholds, was_enabled = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(1)
    gc.enable()
    yield
    gc.set_threshold(*thresholds)
    if not was_enabled:
        gc.disable()


@pytest.mark.usefixtures("_collecting_always")
def test_a_collection_may_come_while_they_are_read() -> None:
    live = LiveInterruptions()
    for at_ns in range(8):
        live.add(10 * at_ns, 10 * at_ns + 5, Cause.SCRAPE)
    live.begin(90, Cause.SCRAPE)
    with GcPauses() as pauses:
        pauses.listeners.append(lambda start_ns, end_ns: live.add(start_ns, end_ns, Cause.GC))
        kept = [[live.within(0, 100)] for _ in range(200)]  # more than the interpreter keeps free lists for
    assert all(found[0][-1] == (90, 100, Cause.SCRAPE) for found in kept)
    assert pauses.take(), "a collection came"


def test_what_is_noted_late_hides_nothing_that_ended_after_it() -> None:
    live = LiveInterruptions()
    live.add(30, 40, Cause.GC)
    live.add(10, 35, Cause.SCRAPE)  # by a thread that was stopped before it could tell
    assert live.quiet_since_ns == 40
    assert live.within(36, 50) == [(36, 40, Cause.GC)]


def test_questions_in_any_order_between_reports_find_what_overlaps() -> None:
    """Each moment belongs to the interruption that began last, of those reported before the question."""
    random, live = Random(1), LiveInterruptions()
    reported: list[tuple[int, int, Cause]] = []
    for end_ns in range(100, 400, 3):
        begin_ns = end_ns - random.randrange(1, 40)
        if random.random() < 0.1:
            live.begin(begin_ns, Cause.SCRAPE)
            reported.append((begin_ns, 1000, Cause.SCRAPE))
        else:
            cause = random.choice((Cause.GC, Cause.CPU_WAIT))
            live.add(begin_ns, end_ns, cause)
            reported.append((begin_ns, end_ns, cause))
        for _ in range(random.randrange(4)):
            start_ns = random.randrange(end_ns)
            stop_ns = start_ns + random.randrange(1, 60)
            found = [(at, cause) for begin, end, cause in live.within(start_ns, stop_ns) for at in range(begin, end)]
            around = [[each for each in reported if each[0] <= at < each[1]] for at in range(start_ns, stop_ns)]
            owners = [(start_ns + i, max(each)[2]) for i, each in enumerate(around) if each]
            assert found == owners


def test_what_kept_the_engine_from_sending_is_its_own_and_not_bookkeeping() -> None:
    """The engine had the tokens at 0, was stopped for 5 and 3 ms, collected for 1, and sent them at 10."""
    arrival = Arrival(0, 10 * MS, 11 * MS, gc_ns=MS, throttled_ns=5 * MS, wait_ns=3 * MS)
    delivery = Delivery(arrival, 11 * MS, 11 * MS, 12 * MS, was_paused=False, index=1)
    assert delivery_segments(delivery, 0, LiveInterruptions()) == [
        (Cause.SCHEDULE, MS),
        (Cause.CPU_THROTTLED, 5 * MS),
        (Cause.CPU_WAIT, 3 * MS),
        (Cause.GC, MS),
        (Cause.EVENT_LOOP, MS),
        (Cause.EVENT_LOOP, MS),
    ]
    late = delivery_segments(delivery, 7 * MS, LiveInterruptions())
    assert late[:2] == [(Cause.CPU_WAIT, 2 * MS), (Cause.GC, MS)], "a write before it had returned by then"
