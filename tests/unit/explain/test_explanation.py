"""Who stands behind a wide gap: the step, the requests, and a sentence."""

import pytest

from roseinfer.explain.explanation import widest_gaps
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.recorder.recording import RequestRecord
from roseinfer.records import PhaseTimes
from tests.unit.bench.recordings import make_recording
from tests.unit.explain.gaps import MS, make_gap
from tests.unit.observe.facts import make_step

STREAMS = [
    RequestRecord(serial=i, request_id=f"stream-{i}", recv_ns=1, scheduled_ns=10 * MS, token_ns=[20 * MS, 100 * MS])
    for i in range(3)
]
LONG = RequestRecord(
    serial=3, request_id="long", recv_ns=1, scheduled_ns=25 * MS, token_ns=[100 * MS], num_prompt_tokens=500
)
LATER = RequestRecord(serial=4, request_id="later", recv_ns=1, scheduled_ns=101 * MS, num_prompt_tokens=900)
STEPS = [
    make_step(step_id=1, start_ns=10 * MS, tokens_ns=20 * MS, num_prefill_tokens=30),
    make_step(step_id=2, start_ns=25 * MS, tokens_ns=100 * MS, num_prefill_tokens=500, num_decode_seqs=3),
]


def test_streams_that_wait_together_are_one_story() -> None:
    parts = {Cause.DECODE: 10.0, Cause.PREFILL_OF_OTHERS: 65.0}
    gaps = [make_gap(parts, serial=i, end_ms=100, step_id=2) for i in range(3)]
    gaps.append(make_gap({Cause.DECODE: 5.0}, end_ms=20, step_id=1))
    first, second = widest_gaps(gaps, make_recording([*STREAMS, LONG, LATER], STEPS), limit=5)
    assert first.sentence == "prefill of request long, 500 tokens"
    assert (first.step_id, first.num_gaps, first.widest_s) == (2, 3, 0.075)
    assert first.waiting == ["stream-0", "stream-1", "stream-2"]
    assert first.behind == ["long"]
    assert (second.cause, second.behind) == (Cause.DECODE, [])


def test_only_the_widest_are_printed() -> None:
    gaps = [make_gap({Cause.GC: float(i)}, step_id=i) for i in range(1, 10)]
    assert [story.step_id for story in widest_gaps(gaps, make_recording(), limit=3)] == [9, 8, 7]


def test_a_gap_over_several_steps_names_the_one_that_shows_it() -> None:
    steps = [*STEPS, make_step(step_id=3, start_ns=101 * MS, tokens_ns=110 * MS, num_decode_seqs=3)]
    gap = make_gap({Cause.DECODE: 20.0, Cause.PREFILL_OF_OTHERS: 70.0}, end_ms=111, step_id=3)
    [story] = widest_gaps([gap], make_recording([*STREAMS, LONG], steps), limit=1)
    assert (story.step_id, story.behind) == (2, ["long"])


def test_a_request_that_had_ended_is_not_behind_a_later_step() -> None:
    aborted = RequestRecord(serial=9, request_id="gone", recv_ns=1, scheduled_ns=5 * MS, end_ns=24 * MS)
    gap = make_gap({Cause.PREFILL_OF_OTHERS: 70.0}, end_ms=100, step_id=2)
    [story] = widest_gaps([gap], make_recording([*STREAMS, aborted, LONG], STEPS), limit=1)
    assert story.behind == ["long"]


def test_many_newcomers_are_counted() -> None:
    newcomers = [
        RequestRecord(serial=10 + i, request_id=f"n{i}", recv_ns=1, scheduled_ns=25 * MS, num_prompt_tokens=100 - i)
        for i in range(5)
    ]
    gap = make_gap({Cause.PREFILL_OF_OTHERS: 70.0}, end_ms=100, step_id=2)
    [story] = widest_gaps([gap], make_recording([*STREAMS, *newcomers], STEPS), limit=1)
    assert story.sentence == "prefill of request n0, n1, n2 and 2 more, 500 tokens"


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_a_sentence(cause: Cause) -> None:
    step = make_step(step_id=2, start_ns=25 * MS, tokens_ns=100 * MS, phases=PhaseTimes(capture=MS))
    gap = make_gap({cause: 70.0}, end_ms=100, step_id=2)
    for steps in ([step], []):
        [story] = widest_gaps([gap], make_recording(STREAMS, steps), limit=1)
        assert len(story.sentence.split()) >= 4


def test_a_collection_is_placed_where_it_happened() -> None:
    gap = make_gap({Cause.GC: 70.0}, end_ms=100, step_id=2)
    here = make_recording(STREAMS, STEPS, [(40 * MS, 90 * MS, Cause.GC)])
    assert widest_gaps([gap], here, 1)[0].sentence == "a garbage collection in the front end took 70 ms"
    assert (
        widest_gaps([gap], make_recording(STREAMS, STEPS), 1)[0].sentence
        == "a garbage collection in the engine took 70 ms"
    )
