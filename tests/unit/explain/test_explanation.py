"""Who stands behind a wide gap: the step, the requests, and a sentence."""

import dataclasses

import msgspec
import pytest

from roseinfer.explain.explanation import explain, widest_gaps
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


def test_a_prompt_that_is_read_again_is_behind_until_it_has_a_token() -> None:
    again, back = (
        RequestRecord(
            serial=serial,
            request_id=name,
            recv_ns=1,
            scheduled_ns=MS,
            preempted_ns=resumed_ns - MS,
            resumed_ns=resumed_ns,
            token_ns=[5 * MS, 20 * MS, 100 * MS],
            num_prompt_tokens=800,
        )
        for serial, name, resumed_ns in ((5, "again", 25 * MS), (6, "back", 12 * MS))
    )
    gap = make_gap({Cause.PREFILL_OF_OTHERS: 70.0}, end_ms=100, step_id=2)
    [story] = widest_gaps([gap], make_recording([*STREAMS, again, back, LONG], STEPS), limit=1)
    assert story.behind == ["again", "long"]


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
    gap = make_gap({Cause.GC: 70.0}, end_ms=180, step_id=2)
    here = make_recording(STREAMS, STEPS, [(105 * MS, 150 * MS, Cause.GC)])
    assert widest_gaps([gap], here, 1)[0].sentence == "a garbage collection in the front end took 70 ms"
    others = make_recording(STREAMS, STEPS, [(MS, 2 * MS, Cause.GC), (200 * MS, 210 * MS, Cause.GC)])
    short = make_recording(STREAMS, STEPS, [(150 * MS, 160 * MS, Cause.GC)])
    before_its_token = make_recording(STREAMS, STEPS, [(50 * MS, 99 * MS, Cause.GC)])
    for elsewhere in (make_recording(STREAMS, STEPS), others, short, before_its_token):
        [story] = widest_gaps([gap], elsewhere, 1)
        assert story.sentence == "a garbage collection in the engine took 70 ms"


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause is not Cause.DECODE])
def test_short_prompts_change_the_advice_against_prompts_alone(cause: Cause) -> None:
    gaps = [make_gap({Cause.DECODE: 10.0} | ({} if i % 10 else {cause: 60.0})) for i in range(100)]
    short = RequestRecord(serial=0, request_id="short", recv_ns=1, num_prompt_tokens=20)
    [knob] = explain(gaps, make_recording([short]), "it", "wire").knobs
    assert (knob.cause, knob.option == cause.row.option) == (cause, cause is not Cause.PREFILL_OF_OTHERS)


@pytest.mark.parametrize("target_itl_ms", [None, 50.0])
def test_what_null_means_is_said_of_null_alone(target_itl_ms: float | None) -> None:
    gaps = [make_gap({Cause.DECODE: 10.0} | ({} if i % 10 else {Cause.PREFILL_OF_OTHERS: 60.0})) for i in range(100)]
    recording = make_recording([LONG])
    meta = msgspec.structs.replace(recording.meta, config={"scheduler": {"target_itl_ms": target_itl_ms}})
    [knob] = explain(gaps, dataclasses.replace(recording, meta=meta), "it", "wire").knobs
    assert (knob.option, knob.value) == ("scheduler.target_itl_ms", target_itl_ms)
    assert bool(knob.meaning) == (target_itl_ms is None)
