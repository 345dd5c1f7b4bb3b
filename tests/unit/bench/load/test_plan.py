"""Loads as plans: when requests are due, how long they are, and which of them share their beginnings."""

import json
from pathlib import Path
from typing import Any

import pytest

from roseinfer.bench.load.plan import (
    FIRST_TOKEN_ID,
    Arrivals,
    LongPrompts,
    Segment,
    Tokens,
    Workload,
    plan_of_recording,
    plan_of_trace,
)
from roseinfer.bench.options import Lengths
from roseinfer.errors import ConfigError, InvalidRequest
from roseinfer.observe.recorder.recording import ClockPair, Recording, RecordingMeta, RequestRecord
from roseinfer.records import FinishReason
from tests.unit.bench.recordings import make_recording
from tests.unit.observe.facts import ENGINE

MS = 1_000_000
PLAIN = Workload(
    arrivals=Arrivals(20 * MS),
    num_requests=4,
    duration_ns=None,
    prompt=Lengths(16, 16),
    output=Lengths(8, 8),
    shared_prefix_share=0.0,
    long=None,
    seed=0,
)


def offsets_ms(workload: Workload) -> list[float]:
    return [request.offset_ns / MS for request in workload.plan()]


def test_a_grid_a_burst_and_a_duration() -> None:
    assert offsets_ms(PLAIN) == [0, 20, 40, 60]
    assert offsets_ms(PLAIN._replace(arrivals=Arrivals(0))) == [0, 0, 0, 0]
    assert offsets_ms(PLAIN._replace(num_requests=None, duration_ns=50 * MS)) == [0, 20, 40]
    assert offsets_ms(PLAIN._replace(duration_ns=30 * MS)) == [0, 20], "whatever ends it first"


def test_a_duration_that_holds_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.bench.load.plan.MAX_REQUESTS", 10)
    assert len(PLAIN._replace(num_requests=None, duration_ns=200 * MS).plan()) == 10
    with pytest.raises(ConfigError, match="holds more than 10 requests") as caught:
        PLAIN._replace(num_requests=None, duration_ns=201 * MS).plan()
    assert caught.value.param == "--duration"


def test_poisson_arrivals_follow_from_the_seed_and_have_the_rate() -> None:
    workload = PLAIN._replace(arrivals=Arrivals(10 * MS, is_poisson=True), num_requests=4000)
    assert offsets_ms(workload) == offsets_ms(workload)
    assert offsets_ms(workload) != offsets_ms(workload._replace(seed=1))
    assert offsets_ms(workload)[-1] / 3999 == pytest.approx(10, rel=0.05)


def test_lengths_are_drawn_from_their_range() -> None:
    planned = PLAIN._replace(prompt=Lengths(3, 5), output=Lengths(1, 2), num_requests=200).plan()
    assert {request.num_prompt_tokens for request in planned} == {3, 4, 5}
    assert {request.max_tokens for request in planned} == {1, 2}


def test_long_prompts_come_beside_the_others_at_their_own_time() -> None:
    long = LongPrompts(500, 9, (30 * MS, 0))
    planned = PLAIN._replace(long=long).plan()
    assert [(request.offset_ns // MS, request.num_prompt_tokens) for request in planned] == [
        *((0, 16), (0, 500), (20, 16), (30, 500), (40, 16), (60, 16))
    ]
    assert [request.max_tokens for request in planned] == [8, 9, 8, 9, 8, 8]


def test_prompts_share_what_they_should_and_nothing_else() -> None:
    tokens = Tokens(seed=1, vocab_size=500)
    prompts = [tokens.of(request.segments) for request in PLAIN._replace(shared_prefix_share=0.5).plan()]
    assert {tuple(prompt[:8]) for prompt in prompts} == {tuple(prompts[0][:8])}
    assert len({tuple(prompt[8:]) for prompt in prompts}) == len(prompts)
    apart = [tokens.of(request.segments) for request in PLAIN.plan()]
    assert len({prompt[0] for prompt in apart}) > 1
    assert all(FIRST_TOKEN_ID <= token_id < 500 for prompt in prompts for token_id in prompt)


def test_a_shorter_segment_is_the_beginning_of_a_longer_one() -> None:
    tokens = Tokens(seed=0, vocab_size=100)
    for key in (0, 5, 2**63, -7):
        assert tokens.of([Segment(key, 40)])[:10] == tokens.of([Segment(key, 10)])
    assert tokens.of([Segment(1, 10)]) != tokens.of([Segment(2, 10)])
    assert tokens.of([Segment(1, 10)]) != Tokens(1, 100).of([Segment(1, 10)])


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def test_a_trace_is_read_line_by_line_and_sorted(tmp_path: Path) -> None:
    later = {"offset_s": 0.5, "prompt_tokens": 7, "max_tokens": 3}
    planned = plan_of_trace(write_lines(tmp_path / "trace", later, later | {"offset_s": 0.25, "prompt_tokens": 4}))
    assert [(request.offset_ns, request.num_prompt_tokens, request.max_tokens) for request in planned] == [
        *((250 * MS, 4, 3), (500 * MS, 7, 3))
    ]


def test_a_trace_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(b'{"offset_s": 1, "prompt_tokens": 2, "max_tokens": 3, "\xff": 1}')
    with pytest.raises(ConfigError, match="line 1"):
        plan_of_trace(tmp_path / "trace")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no request"),
        ('{"offset_s": 1, "prompt_tokens": 2}', "line 1: .*max_tokens"),
        ('{"offset_s": -1, "prompt_tokens": 2, "max_tokens": 3}', "line 1: offset_s"),
        ('\n{"offset_s": 1, "prompt_tokens": 2, "max_tokens": 3, "text": "a"}', "line 2: .*text"),
        ("hello", "line 1 is not JSON"),
    ],
)
def test_a_trace_that_cannot_be_used_is_named(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(content)
    with pytest.raises(ConfigError, match=words) as refusal:
        plan_of_trace(tmp_path / "trace")
    assert refusal.value.param == "--trace"


def test_a_missing_trace_and_a_damaged_recording_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        plan_of_trace(tmp_path / "none")
    (tmp_path / "a.npz").write_bytes(b"PK nothing")
    with pytest.raises(InvalidRequest, match="no recording"):
        plan_of_trace(tmp_path / "a.npz")


def record(serial: int, num_tokens: int, **changes: Any) -> RequestRecord:
    """Came 10 ms after the one before; a token every millisecond from 5 ms on."""
    recv_ns = (1000 + 10 * serial) * MS
    fields: dict[str, Any] = {
        "request_id": f"r{serial}",
        "recv_ns": recv_ns,
        "end_ns": recv_ns + 9 * MS,
        "token_ns": [recv_ns + (5 + index) * MS for index in range(num_tokens)],
        "num_prompt_tokens": 40,
        "max_tokens": 50,
        "finish_reason": FinishReason.LENGTH,
    }
    return RequestRecord(serial=serial, **(fields | changes))


def test_a_recording_is_asked_again_with_its_prefixes_lengths_and_aborts(tmp_path: Path) -> None:
    recording = make_recording(
        [
            record(0, 3, prefix_digests=[11, 12]),
            record(1, 4, prefix_digests=[11, 13], finish_reason=FinishReason.STOP),
            record(2, 2, client_disconnected=True, finish_reason=FinishReason.ABORT),
            record(3, 0, client_disconnected=True, finish_reason=FinishReason.ABORT),
            record(4, 0, num_prompt_tokens=0, finish_reason=FinishReason.REJECTED),
        ]
    )
    recording.save(tmp_path / "a.npz")
    plan = plan_of_recording(recording)
    assert plan.requests == plan_of_trace(tmp_path / "a.npz")
    assert plan.num_skipped == 1
    assert [request.offset_ns // MS for request in plan.requests] == [0, 10, 20, 30]
    assert [request.max_tokens for request in plan.requests] == [3, 4, 50, 50]
    assert [request.abort_after_tokens for request in plan.requests] == [None, None, 2, None]
    assert [request.abort_after_ns for request in plan.requests] == [None, None, None, 9 * MS]
    first, second, *_ = [Tokens(0, 1000).of(request.segments) for request in plan.requests]
    assert ENGINE.block_size == 16
    assert first[:16] == second[:16]
    assert first[16:32] != second[16:32]
    assert [len(first), len(second)] == [40, 40]


def test_requests_are_asked_again_in_the_order_in_which_they_were_received() -> None:
    """Serials are given after tokenising, which takes longer for a long prompt."""
    early = record(2, 3, recv_ns=995 * MS)
    plan = plan_of_recording(make_recording([record(0, 1), record(1, 2), early]))
    assert [request.offset_ns // MS for request in plan.requests] == [0, 5, 15]
    assert [request.max_tokens for request in plan.requests] == [3, 1, 2]
    assert plan.records[0] is early


def test_a_recording_without_a_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="no request that could be asked again"):
        plan_of_recording(make_recording([]))
    empty = Recording(
        meta=RecordingMeta(version="1", model_name="m", clock=ClockPair(1, 2), engine=None),
        requests=[record(0, 1, prefix_digests=[1, 2, 3])],
    )
    assert plan_of_recording(empty).requests[0].num_prompt_tokens == 40, "without a block size digests mean nothing"
