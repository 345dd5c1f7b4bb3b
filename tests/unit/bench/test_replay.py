"""What a recording says of its requests, as `bench replay` compares it."""

from dataclasses import replace
from typing import Any

import numpy as np

from roseinfer.bench.observed import Observed
from roseinfer.bench.replay import recorded_requests
from roseinfer.observe import intervals
from roseinfer.observe.recording import WRITE_DTYPE, RequestRecord
from tests.unit.bench.recordings import make_recording
from tests.unit.observe.facts import MS, make_timeline


def recorded(num_forgotten: int, *, is_wire: bool = True) -> list[Observed]:
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
    recording = make_recording([RequestRecord.of(timeline) for timeline in timelines])
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
        assert [request.is_complete for request in recorded(num_forgotten)] == [False, True]
    assert all(request.is_complete for request in recorded(3, is_wire=False))
