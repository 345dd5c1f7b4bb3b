"""The recorder keeps the newest facts in order, forgets the oldest, and allocates nothing that stays."""

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roseinfer.config.options import Config, ObserveConfig
from roseinfer.observe.gaps.causes import CAUSES, Cause
from roseinfer.observe.recorder.recorder import FlightRecorder, Ring
from roseinfer.observe.recorder.recording import WRITE_DTYPE, Recording, RequestRecord
from roseinfer.records import Advanced, Arrival, Delivery, FinishReason, RequestTimeline
from tests.unit.observe.facts import ENGINE, MS, Traffic, make_step, make_timeline, writes_of

ROW = np.dtype([("at_ns", np.int64)])


def make_recorder(**sizes: Any) -> FlightRecorder:
    return FlightRecorder(Config(observe=ObserveConfig(**sizes)), "1.2.3")


def delivered(written_ns: int) -> Delivery:
    arrival = Arrival(written_ns - 5, written_ns - 4, written_ns - 3)
    return Delivery(arrival, written_ns - 2, written_ns - 1, written_ns, was_paused=False, index=0)


@pytest.mark.parametrize("num_added", [0, 1, 7, 8, 9, 16, 21])
def test_a_ring_holds_the_newest_rows_in_order(num_added: int) -> None:
    ring = Ring(ROW, 8)
    for number in range(num_added):
        ring.add((number,))
    kept = list(range(num_added))[-8:]
    assert ring.newest()["at_ns"].tolist() == kept
    for count in (0, 1, 3, 8, 100):
        assert ring.newest(count)["at_ns"].tolist() == (kept[-count:] if count else [])
    for value in range(-1, num_added + 1):
        assert ring.since("at_ns", value)["at_ns"].tolist() == [number for number in kept if number > value]


def test_what_a_ring_gave_does_not_change() -> None:
    ring = Ring(ROW, 4)
    ring.add((1,))
    given = ring.newest()
    for number in range(2, 9):
        ring.add((number,))
    assert given["at_ns"].tolist() == [1]


def test_a_snapshot_holds_the_facts() -> None:
    recorder = make_recorder()
    recorder.engine_info = ENGINE
    first, second = make_timeline(), RequestTimeline(request_id="r-2", recv_ns=1002 * MS, serial=1)
    recorder.on_start(first)
    recorder.on_start(second)
    recorder.on_step(make_step(step_id=1, num_decode_seqs=2), Advanced.newest([first]))
    recorder.on_writes(writes_of((first, delivered(1063 * MS))))
    recorder.on_finish(first)
    recording = recorder.snapshot(trigger="by hand").recording()
    assert recording.requests == [RequestRecord.of(first), RequestRecord.of(second)]
    assert recording.steps[["step_id", "num_decode_seqs"]].tolist() == [(1, 2)]
    assert recording.writes[["serial", "written_ns"]].tolist() == [(0, 1063 * MS)]
    meta = recording.meta
    assert meta.num_forgotten_writes == 0
    assert (meta.engine, meta.trigger, meta.version, meta.model_name) == (ENGINE, "by hand", "1.2.3", "roseinfer-demo")
    assert set(meta.config) == {"scheduler", "cache", "runner", "engine", "observe"}
    assert meta.config["observe"] == {"slow_gap_factor": 3.0, "slow_gap_min_ms": 2.0}, "nothing that names a place"


def test_a_snapshot_can_be_saved(tmp_path: Path) -> None:
    recorder = make_recorder()
    traffic = Traffic(recorder)
    for _ in range(5):
        traffic.arrive(7)
        traffic.step(MS, 1)
    recorder.snapshot().recording().save(tmp_path / "a.npz")
    loaded = Recording.load(tmp_path / "a.npz")
    assert loaded.requests == recorder.snapshot().recording().requests
    assert loaded.steps["step_id"].tolist() == [1, 2, 3, 4, 5]
    assert loaded.meta.config["scheduler"]["max_num_seqs"] == 64


def test_the_oldest_facts_are_forgotten() -> None:
    recorder = make_recorder(recorder_steps=128)
    for number in range(1100):
        timeline = make_timeline(request_id=f"r-{number}", serial=number)
        recorder.on_start(timeline)
        recorder.on_step(make_step(step_id=number), Advanced())
        recorder.on_writes(writes_of((timeline, delivered(number))))
        recorder.on_finish(timeline)
    recording = recorder.snapshot().recording()
    newest = list(range(1100))
    assert recording.steps["step_id"].tolist() == newest[-128:]
    assert recording.writes["serial"].tolist() == newest[-1024:]
    assert recording.meta.num_forgotten_writes == 1100 - 1024
    assert [request.serial for request in recording.requests] == newest[-16:]


def test_a_flood_of_refused_requests_pushes_out_none_that_had_tokens() -> None:
    recorder = make_recorder(recorder_steps=128)
    refused = {"finish_reason": FinishReason.REJECTED, "token_ns": [], "write_ns": []}
    for number in range(116):
        is_real = number < 16
        timeline = make_timeline(request_id=f"r-{number}", serial=number, **({} if is_real else refused))
        timeline.end_ns += number
        recorder.on_start(timeline)
        recorder.on_finish(timeline)
    assert [request.serial for request in recorder.snapshot().recording().requests] == [*range(16), 114, 115]
    assert recorder.find("r-0") is not None
    assert recorder.find("r-100") is None
    again = make_timeline(request_id="r-115", serial=200, end_ns=1_000_000 * MS)
    recorder.on_start(again)
    recorder.on_finish(again)
    found = recorder.find("r-115")
    assert found is not None
    assert found.serial == 200, "the one that ended last under this id"


def test_a_part_begins_with_its_first_step() -> None:
    recorder = make_recorder()
    traffic = Traffic(recorder)
    for _ in range(20):
        traffic.arrive(7)
        traffic.step(MS, 1)
        traffic.end(0, FinishReason.LENGTH)
    recording = recorder.snapshot(5).recording()
    assert recording.steps["step_id"].tolist() == [16, 17, 18, 19, 20]
    begin_ns = recording.steps["start_ns"][0]
    ended = [request for request in recording.requests if request.end_ns]
    assert len(ended) == 5
    assert all(request.end_ns >= begin_ns for request in ended)


def test_a_part_that_begins_with_a_moment_has_nothing_that_ended_before() -> None:
    recorder = make_recorder()
    for number, at_ns in enumerate((1000 * MS, 2000 * MS, 3000 * MS)):
        timeline = make_timeline(request_id=f"r-{number}", serial=number, end_ns=at_ns)
        recorder.on_start(timeline)
        recorder.on_step(make_step(step_id=number, end_ns=at_ns), Advanced())
        recorder.on_writes(writes_of((timeline, delivered(at_ns))))
        recorder.note_interruption(Cause.GC, at_ns - 1, at_ns)
        recorder.on_finish(timeline)
    recorder.on_start(make_timeline(request_id="in flight", serial=9, end_ns=0))
    recording = recorder.snapshot_since(1500 * MS).recording()
    assert [request.serial for request in recording.requests] == [1, 2, 9]
    assert recording.steps["step_id"].tolist() == [1, 2]
    assert recording.writes["serial"].tolist() == [1, 2]
    assert len(recording.interruptions) == 2
    assert (recording.meta.num_forgotten_writes, recording.meta.begin_ns) == (0, 1500 * MS), "left out is not forgotten"
    assert len(recorder.snapshot_since(0).recording().steps) == 3


def test_a_request_that_the_engine_held_longer_hides_none_that_ended_after_it() -> None:
    recorder = make_recorder()
    left, other = (make_timeline(request_id=name, serial=i) for i, name in enumerate(("left", "other")))
    left.end_ns, other.end_ns = 1000 * MS, 2000 * MS
    recorder.on_start(left)
    recorder.on_start(other)
    recorder.on_finish(other)
    recorder.on_finish(left)
    assert [request.serial for request in recorder.snapshot_since(1500 * MS).recording().requests] == [1]


def test_a_request_is_found_in_flight_and_afterwards() -> None:
    recorder = make_recorder()
    timeline = make_timeline(request_id="twin", end_ns=0, finish_reason=None)
    recorder.on_start(timeline)
    assert recorder.find("twin") == RequestRecord.of(timeline)
    timeline.end_ns, timeline.finish_reason = 1191 * MS, FinishReason.STOP
    recorder.on_finish(timeline)
    again = make_timeline(request_id="twin", serial=1)
    recorder.on_start(again)
    recorder.on_finish(again)
    found = recorder.find("twin")
    assert found is not None
    assert found.serial == 1
    assert recorder.find("nobody") is None


def test_the_writes_of_one_request() -> None:
    recorder = make_recorder()
    timelines = [make_timeline(request_id=f"r-{number}", serial=number) for number in range(2)]
    for timeline in timelines:
        recorder.on_start(timeline)
    recorder.on_writes(writes_of(*((timelines[number % 2], delivered(number)) for number in range(6))))
    assert recorder.writes_of(1)["written_ns"].tolist() == [1, 3, 5]


def test_interruptions_are_in_the_order_of_their_starts() -> None:
    recorder = make_recorder()
    recorder.note_interruption(Cause.GC, 30, 40)
    recorder.on_step(make_step(step_id=1), Advanced())
    recorder.note_interruption(Cause.SCRAPE, 10, 50)
    rows = recorder.snapshot().recording().interruptions
    assert [(start, end, CAUSES[cause]) for start, end, cause in rows.tolist()] == [
        (10, 50, Cause.SCRAPE),
        (30, 40, Cause.GC),
    ]


def test_a_step_leaves_nothing_allocated() -> None:
    """Nor does a write: whatever the number of steps, memory stays where it was when the rings were made."""
    recorder = make_recorder(recorder_steps=128)
    timeline, record, delivery = make_timeline(), make_step(step_id=1), delivered(7)
    recorder.on_start(timeline)

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            recorder.on_step(record, Advanced.newest([timeline]))
            recorder.on_writes(writes_of(*[(timeline, delivery)] * 8))
            recorder.note_interruption(Cause.GC, 1, 2)

    run(5000)  # past the ends of all rings
    gc.collect()
    tracemalloc.start()
    try:
        run(10)
        before, _ = tracemalloc.get_traced_memory()
        run(2000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 16_384, "2000 steps and 16,000 writes: a byte of each would be more"


def test_a_finished_request_is_no_work_for_the_garbage_collector() -> None:
    recorder = make_recorder()
    for number in range(3):
        timeline = make_timeline(request_id=f"r-{number}", serial=number)
        recorder.on_start(timeline)
        recorder.on_finish(timeline)
    gc.collect()
    assert not any(gc.is_tracked(entry) for entry in recorder._finished)


def test_the_size_of_rows_is_what_the_options_say() -> None:
    assert WRITE_DTYPE.itemsize == 57
    assert make_recorder()._steps.newest().dtype.itemsize <= 402
