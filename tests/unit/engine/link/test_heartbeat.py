"""An engine's account of itself: a collection interrupts what it does, ends none of it, and gives it no more time."""

import gc
import threading
import time

import pytest

from roseinfer.engine.link.heartbeat import Activity, Heartbeat
from roseinfer.engine.loop import note_pauses
from tests.unit.engine.harness import make_engine

pytestmark = pytest.mark.usefixtures("only_our_collections")
ACTIVITIES = [Activity.IDLE, Activity.STEPPING, Activity.CAPTURING, Activity.PROFILING]


class Clock:
    """The monotonic clock, as it is set."""

    now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic_ns", clock)
    return clock


@pytest.mark.parametrize("activity", ACTIVITIES)
def test_what_a_collection_interrupts_goes_on_with_the_time_it_had(clock: Clock, activity: Activity) -> None:
    heartbeat = Heartbeat()
    heartbeat.begin(activity)
    for collections_ns in (0, 50):  # so many had been before
        clock.now_ns += 30
        heartbeat.begin_collection()
        assert heartbeat.read() == (Activity.GC, clock.now_ns)
        clock.now_ns += 50
        heartbeat.end_collection()
        assert heartbeat.read() == (activity, 1_000 + collections_ns + 50)


def test_what_begins_after_a_collection_has_its_own_time(clock: Clock) -> None:
    heartbeat = Heartbeat()
    heartbeat.begin(Activity.STEPPING)
    heartbeat.begin_collection()
    clock.now_ns += 50
    heartbeat.end_collection()
    clock.now_ns += 7
    heartbeat.begin(Activity.STEPPING)
    assert heartbeat.read() == (Activity.STEPPING, 1_057)


def test_an_end_without_a_beginning_is_nothing(clock: Clock) -> None:
    """As of a collection during which the next step began: its callback may let the engine's thread go on."""
    heartbeat = Heartbeat()
    heartbeat.begin_collection()
    clock.now_ns += 50
    heartbeat.begin(Activity.STEPPING)
    heartbeat.end_collection()
    assert heartbeat.read() == (Activity.STEPPING, 1_050)


def test_a_collection_in_a_capture_ends_no_allowance() -> None:
    engine, heartbeat = make_engine(), Heartbeat()
    with note_pauses(engine, heartbeat), engine.phases.begin(1)("capture"):
        gc.collect()
        assert heartbeat.read().activity is Activity.CAPTURING
    assert heartbeat.read().activity is Activity.STEPPING


def test_collections_of_another_thread_keep_no_hung_step_alive(clock: Clock) -> None:
    """A thread beside the engine's compiles grammars, and may collect while the engine waits for a device for ever."""
    engine, heartbeat = make_engine(), Heartbeat()
    heartbeat.begin(Activity.STEPPING)
    began = heartbeat.read()
    with note_pauses(engine, heartbeat):
        for _ in range(3):
            clock.now_ns += 10**9
            other = threading.Thread(target=gc.collect)
            other.start()
            other.join()
    assert heartbeat.read() == began
