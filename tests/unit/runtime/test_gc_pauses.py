"""Each collection is noted once, with what it took by the given clock, and only while somebody listens."""

import gc
from itertools import count

import pytest

from roseinfer.runtime.gc_pauses import GcPauses

pytestmark = pytest.mark.usefixtures("only_our_collections")


def test_each_collection_is_taken_once() -> None:
    ticks = count(step=5)
    with GcPauses(lambda: next(ticks)) as pauses:
        assert pauses.take() == []
        gc.collect()
        gc.collect(0)
        assert pauses.take() == [5, 5]
        assert pauses.take() == []
    gc.collect()
    assert pauses.take() == []


def test_a_collection_that_began_before_is_not_noted() -> None:
    class Opens:
        """Garbage in a cycle, whose finaliser runs within the collection."""

        def __init__(self, pauses: GcPauses) -> None:
            self.cycle = self
            self.pauses = pauses

        def __del__(self) -> None:
            self.pauses.__enter__()

    pauses = GcPauses()
    Opens(pauses)
    gc.collect()
    assert pauses.take() == []
    gc.collect()
    assert len(pauses.take()) == 1
    pauses.__exit__()


def test_with_the_real_clock_a_pause_takes_time() -> None:
    with GcPauses() as pauses:
        gc.collect()
    [pause_ns] = pauses.take()
    assert pause_ns > 0


def test_listeners_hear_of_start_and_end() -> None:
    ticks, heard = count(step=5), list[tuple[int, int]]()
    with GcPauses(lambda: next(ticks)) as pauses:
        pauses.listeners.append(lambda start_ns, end_ns: heard.append((start_ns, end_ns)))
        gc.collect()
        gc.collect()
    assert heard == [(0, 5), (10, 15)]


def test_each_collection_is_announced_and_ended_once() -> None:
    heard: list[str] = []
    with GcPauses(on_start=lambda: heard.append("start"), on_end=lambda: heard.append("end")):
        gc.collect()
        gc.collect(0)
    gc.collect()
    assert heard == ["start", "end", "start", "end"]
