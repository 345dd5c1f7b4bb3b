"""Writes as columns say the same as writes one by one."""

import random

import pytest

from roseinfer.observe.gaps.attribution import Attribution
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.writes import COLUMNS, Writes
from roseinfer.records import Arrival, Delivery
from tests.unit.observe.facts import MS, make_timeline, writes_of
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
    assert not len(Writes())


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
