"""What a recording says of its requests, as `bench replay` compares it."""

from dataclasses import replace
from typing import Any

import numpy as np

from roseinfer.bench.definitions import Observed
from roseinfer.bench.simulate.replay import recorded_requests
from roseinfer.observe.gaps import intervals
from roseinfer.observe.recorder.recording import WRITE_DTYPE, RequestRecord
from tests.unit.bench.recordings import make_recording
from tests.unit.observe.facts import MS, make_timeline


def recorded(num_forgotten: int, *, is_wire: bool = True, is_counted: bool = True) -> list[Observed]:
    """Two requests, the second of which came three seconds later; the oldest writes have been forgotten."""
    later: dict[str, Any] = {name: stamp + 3000 * MS for name, stamp in (("recv_ns", 1000 * MS), ("end_ns", 1191 * MS))}
    later["token_ns"] = [stamp + 3000 * MS for stamp in make_timeline().token_ns]
    later["write_ns"] = [stamp + 3000 * MS for stamp in make_timeline().write_ns]
    timelines = [make_timeline(), make_timeline(request_id="r-2", serial=1, **later)]
    rows = [
        (timeline.serial, tokens_ns, tokens_ns, tokens_ns, tokens_ns, tokens_ns, written_ns, False)
        for timeline in timelines
        for tokens_ns, written_ns in zip(timeline.token_ns, timeline.write_ns, strict=True)
    ]
    requests = [RequestRecord.of(timeline) for timeline in timelines]
    recording = make_recording(requests, num_forgotten_writes=num_forgotten if is_counted else None)
    recording = replace(recording, writes=np.array(rows[num_forgotten:], WRITE_DTYPE))
    return recorded_requests(recording, recording.requests, is_wire=is_wire)


def test_times_begin_at_the_arrival_as_those_of_the_server_do() -> None:
    for request in recorded(0):
        assert request.is_complete
        assert request.ttft_ns == intervals.time_to_first_token_ns(make_timeline())
        assert request.latency_ns == intervals.request_duration_ns(make_timeline())
    for request in recorded(0, is_wire=False):
        assert request.ttft_ns == make_timeline().token_ns[0] - make_timeline().recv_ns


def test_a_request_whose_first_write_was_forgotten_has_no_time_to_first_token() -> None:
    for num_forgotten in (1, 3):
        for is_counted in (True, False):
            found = recorded(num_forgotten, is_counted=is_counted)
            assert [request.is_complete for request in found] == [False, True]
    assert all(request.is_complete for request in recorded(3, is_wire=False))


def test_what_a_recording_left_out_was_not_forgotten() -> None:
    """It begins between the second and the third token of one; the other came later, and its first write had two."""
    early, late = make_timeline(), make_timeline(request_id="r-2", serial=1)
    for name in ("recv_ns", "end_ns"):
        setattr(late, name, getattr(late, name) + 3000 * MS)
    for name in ("token_ns", "write_ns"):
        setattr(late, name, [stamp + 3000 * MS for stamp in getattr(late, name)])
    rows = [
        (timeline.serial, *[timeline.token_ns[index]] * 5, timeline.write_ns[index], False)
        for timeline, index in ((early, 2), (late, 1), (late, 2))
    ]
    requests = [RequestRecord.of(timeline) for timeline in (early, late)]
    recording = make_recording(requests, num_forgotten_writes=0, begin_ns=early.write_ns[1])
    recording = replace(recording, writes=np.array(rows, WRITE_DTYPE))
    found = recorded_requests(recording, requests, is_wire=True)
    assert [request.error for request in found] == ["its first write was forgotten", ""]
    assert found[1].token_counts == [2, 1]


def written_once(num_forgotten: int | None, *, is_streamed: bool, num_first: int) -> list[Observed]:
    """Two requests at once, whose first writes have so many of their three tokens; the second is the slower one.

    The oldest write that is kept returned later than both had their first token.
    """
    timelines = [make_timeline(request_id=f"r-{serial}", serial=serial, is_streamed=is_streamed) for serial in (0, 1)]
    rows = []
    for timeline in timelines:
        for index in range(num_first - 1, 3):
            tokens_ns, written_ns = timeline.token_ns[index], timeline.write_ns[index] + timeline.serial
            rows.append((timeline.serial, tokens_ns, tokens_ns, tokens_ns, tokens_ns, tokens_ns, written_ns, False))
    rows.sort(key=lambda row: row[-2])
    requests = [RequestRecord.of(timeline) for timeline in timelines]
    recording = make_recording(requests, num_forgotten_writes=num_forgotten)
    recording = replace(recording, writes=np.array(rows, WRITE_DTYPE))
    assert recording.writes["written_ns"][0] > timelines[1].token_ns[0]
    return recorded_requests(recording, requests, is_wire=True)


def test_a_first_write_of_two_tokens_was_not_forgotten_where_nothing_was() -> None:
    for request in written_once(0, is_streamed=True, num_first=2):
        assert (request.error, request.token_counts) == ("", [2, 1])
    assert [request.error for request in written_once(1, is_streamed=True, num_first=2)] == [
        "its first write was forgotten"
    ] * 2, "or it was one of those that were"


def test_an_answer_in_one_piece_has_its_only_write_whatever_was_forgotten() -> None:
    for num_forgotten in (0, 1, None):
        for request in written_once(num_forgotten, is_streamed=False, num_first=3):
            assert (request.error, request.token_counts) == ("", [3])
