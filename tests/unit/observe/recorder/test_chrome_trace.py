"""Requests share lanes without overlapping, and steps that overlap have a track each."""

import json
from itertools import pairwise
from typing import Any

import msgspec

from roseinfer.config.options import Config
from roseinfer.observe.recorder.chrome_trace import ENGINE, assign_lanes, chrome_trace
from roseinfer.observe.recorder.recorder import FlightRecorder
from roseinfer.observe.recorder.recording import RequestRecord
from roseinfer.records import Advanced, BlockedBy, PhaseTimes
from tests.unit.observe.facts import MS, make_step, make_timeline


def request(serial: int, recv_ns: int, end_ns: int) -> RequestRecord:
    return RequestRecord(serial=serial, request_id=f"r-{serial}", recv_ns=recv_ns, end_ns=end_ns)


def test_a_lane_is_used_again_when_its_request_has_ended() -> None:
    requests = [request(0, 1, 10), request(1, 2, 5), request(2, 5, 20), request(3, 6, 0), request(4, 30, 40)]
    assert assign_lanes(requests) == {0: 0, 1: 1, 2: 1, 3: 2, 4: 0}


def trace_of(recorder: FlightRecorder) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(chrome_trace(recorder.snapshot().recording()))["traceEvents"]
    return events


def test_pipelined_steps_do_not_overlap_on_their_tracks() -> None:
    recorder = FlightRecorder(Config(), "1.2.3")
    for number in range(1, 9):
        start_ns = number * 10 * MS
        phases = PhaseTimes(schedule=MS, launch=2 * MS, wait=4 * MS, commit=MS, stage=MS, forward=MS // 2)
        stamps = {"start_ns": start_ns, "tokens_ns": start_ns + 15 * MS, "end_ns": start_ns + 17 * MS}
        step = make_step(step_id=number, num_decode_seqs=1, phases=phases, pipeline_depth=1, **stamps)
        recorder.on_step(msgspec.structs.replace(step, blocked_by=BlockedBy.SLOTS), Advanced())
    steps = [event for event in trace_of(recorder) if event["name"].startswith("step ")]
    assert {event["tid"] for event in steps} == {0, 1}
    for track in (0, 1):
        spans = [(event["ts"], event["ts"] + event["dur"]) for event in steps if event["tid"] == track]
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert steps[0]["args"]["blocked_by"] == "slots"


def test_phases_lie_within_their_step() -> None:
    recorder = FlightRecorder(Config(), "1.2.3")
    phases = PhaseTimes(schedule=MS, launch=4 * MS, wait=MS, commit=MS // 2, stage=MS, h2d=MS // 2, forward=2 * MS)
    recorder.on_step(make_step(step_id=1, phases=phases, start_ns=MS, tokens_ns=8 * MS, end_ns=9 * MS), Advanced())
    engine = {event["name"]: event for event in trace_of(recorder) if event["pid"] == ENGINE and event["ph"] == "X"}
    step = engine.pop("step 1 idle")
    assert set(engine) == {"schedule", "launch", "stage", "h2d", "forward", "wait", "commit"}
    for event in engine.values():
        assert step["ts"] <= event["ts"]
        assert event["ts"] + event["dur"] <= step["ts"] + step["dur"]
        assert event["args"] == {"step_id": 1}
    assert engine["stage"]["ts"] <= engine["h2d"]["ts"] < engine["forward"]["ts"]


def test_an_empty_recording_is_an_empty_trace() -> None:
    assert {event["ph"] for event in trace_of(FlightRecorder(Config(), "1.2.3"))} == {"M"}


def test_a_request_that_never_reached_the_engine_is_shown() -> None:
    recorder = FlightRecorder(Config(), "1.2.3")
    timeline = make_timeline(inbox_ns=0, scheduled_ns=0, token_ns=[], write_ns=[])
    recorder.on_start(timeline)
    recorder.on_finish(timeline)
    names = [event["name"] for event in trace_of(recorder) if event["ph"] == "X"]
    assert names == ["r-1", "receive", "tokenize"]
