"""What a span says: the stamps of the facts, no others."""

from collections.abc import Iterator
from itertools import count, pairwise

import pytest

from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.tracing import semconv, spans
from roseinfer.observe.tracing.spans import Span, TraceContext
from roseinfer.records import Api, BlockedBy, FinishReason, PhaseTimes, RequestTimeline, StepRecord
from tests.unit.observe.facts import MS, make_step, make_timeline

SHARED = {semconv.GEN_AI_REQUEST_MODEL: "tiny", semconv.GEN_AI_PROVIDER_NAME: "roseinfer"}


def context(**changes: object) -> TraceContext:
    return TraceContext(**({"trace_id": 5, "span_id": 6, "parent_span_id": 0, "is_kept": True} | changes))  # type: ignore[arg-type]


def make_spans(timeline: RequestTimeline, place: TraceContext | None = None) -> list[Span]:
    ids = count(100)
    return spans.request_spans(timeline, place or context(), SHARED, lambda: next(ids))


def named(found: list[Span]) -> dict[str, tuple[int, int]]:
    return {span.name.removeprefix("roseinfer."): (span.start_ns, span.end_ns) for span in found}


def test_children_have_the_stamps_of_the_timeline_and_leave_no_hole() -> None:
    timeline = make_timeline(api=Api.CHAT)
    whole, *children = make_spans(timeline)
    assert (whole.name, whole.start_ns, whole.end_ns) == ("chat tiny", timeline.recv_ns, timeline.end_ns)
    assert named(children) == {
        "receive": (timeline.recv_ns, timeline.parsed_ns),
        "tokenize": (timeline.parsed_ns, timeline.tokenized_ns),
        "submit": (timeline.tokenized_ns, timeline.inbox_ns),
        "queue": (timeline.inbox_ns, timeline.scheduled_ns),
        "prefill": (timeline.scheduled_ns, timeline.token_ns[0]),
        "decode": (timeline.token_ns[0], timeline.token_ns[-1]),
        "write": (timeline.token_ns[-1], timeline.write_ns[-1]),
    }
    assert all(earlier.end_ns == later.start_ns for earlier, later in pairwise(children))
    assert {(child.trace_id, child.parent_span_id) for child in children} == {(5, 6)}
    assert len({span.span_id for span in (whole, *children)}) == 8
    assert whole.is_server
    assert not any(child.is_server for child in children)


def lives() -> Iterator[tuple[dict[str, object], str, int]]:
    """What a request did not reach, its last part, and where that begins."""
    unreached: dict[str, object] = {"write_ns": [], "token_ns": []}
    yield unreached, "prefill", 1015 * MS
    for name, last, start_ms in (("scheduled_ns", "queue", 1007), ("inbox_ns", "submit", 1003)):
        unreached = unreached | {name: 0}
        yield unreached, last, start_ms * MS
    unreached = unreached | {"tokenized_ns": 0}
    yield unreached, "tokenize", 1001 * MS
    yield unreached | {"parsed_ns": 0}, "receive", 1000 * MS


@pytest.mark.parametrize(("unreached", "last", "start_ns"), list(lives()))
def test_the_part_in_which_a_request_ended_goes_to_its_end(
    unreached: dict[str, object], last: str, start_ns: int
) -> None:
    timeline = make_timeline(finish_reason=FinishReason.ABORT, **unreached)
    _, *children = make_spans(timeline)
    assert children[-1].name == f"roseinfer.{last}"
    assert (children[-1].start_ns, children[-1].end_ns) == (start_ns, timeline.end_ns)


def test_one_token_takes_no_time_to_decode() -> None:
    timeline = make_timeline(token_ns=[1031 * MS], write_ns=[1063 * MS])
    assert list(named(make_spans(timeline)))[-2:] == ["prefill", "write"]
    assert named(make_spans(timeline))["write"] == (1031 * MS, 1063 * MS)


def test_a_token_that_came_after_the_end_ends_no_part_before_it_began() -> None:
    """A client that has gone is told to the engine, which meanwhile makes one more token."""
    timeline = make_timeline(token_ns=[1031 * MS, 1200 * MS], write_ns=[1063 * MS], finish_reason=FinishReason.ABORT)
    found = make_spans(timeline)
    assert all(span.start_ns <= span.end_ns for span in found)
    assert named(found)["decode"] == (1031 * MS, 1200 * MS)
    assert "write" not in named(found)


def test_attributes_are_those_of_the_conventions_and_nothing_unknown_is_told() -> None:
    timeline = make_timeline(
        api=Api.COMPLETIONS, max_tokens=9, temperature=0.5, top_p=0.9, num_cached_tokens=4, num_preemptions=1
    )
    told = make_spans(timeline)[0].attributes
    assert told[semconv.GEN_AI_OPERATION_NAME] == "text_completion"
    assert told[semconv.GEN_AI_REQUEST_MODEL] == "tiny"
    assert told[semconv.GEN_AI_REQUEST_MAX_TOKENS] == 9
    assert told[semconv.GEN_AI_REQUEST_TEMPERATURE] == 0.5
    assert told[semconv.GEN_AI_REQUEST_TOP_P] == 0.9
    assert told[semconv.GEN_AI_USAGE_INPUT_TOKENS] == 7
    assert told[semconv.GEN_AI_USAGE_OUTPUT_TOKENS] == 3
    assert told[semconv.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS] == 4
    assert told[semconv.GEN_AI_RESPONSE_FINISH_REASONS] == ["length"]
    assert told[semconv.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] == 0.063
    assert told["roseinfer.longest_inter_token_latency_s"] == 0.064
    assert told["roseinfer.request_id"] == "r-1"
    refused = RequestTimeline(
        request_id="r-2", recv_ns=1, end_ns=5, finish_reason=FinishReason.REJECTED, error_code="invalid_value"
    )
    whole, receive = make_spans(refused)
    assert (whole.name, receive.name) == ("text_completion tiny", "roseinfer.receive")
    assert whole.attributes[semconv.ERROR_TYPE] == "invalid_value"
    assert whole.error is None  # the client's mistake
    assert not {semconv.GEN_AI_USAGE_INPUT_TOKENS, semconv.GEN_AI_REQUEST_MAX_TOKENS} & set(whole.attributes)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.TIMEOUT])
def test_a_fault_of_the_server_is_an_error(reason: FinishReason) -> None:
    whole = make_spans(make_timeline(finish_reason=reason, error_code="engine_dead"))[0]
    assert (whole.error, whole.attributes[semconv.ERROR_TYPE]) == ("engine_dead", "engine_dead")


def test_events_are_the_preemption_and_the_longest_slow_gaps() -> None:
    gaps = [Gap(0, 3, 10, 10 + length, 44, {}, Cause.KV_WAIT, True) for length in (9, 8, 7)]
    timeline = make_timeline(preempted_ns=1100 * MS, resumed_ns=1120 * MS)
    events = make_spans(timeline, context(slow_gaps=gaps))[0].events
    assert [(event.name, event.at_ns) for event in events] == [
        ("roseinfer.preempted", 1100 * MS),
        ("roseinfer.resumed", 1120 * MS),
        ("roseinfer.slow_gap", 19),
        ("roseinfer.slow_gap", 18),
        ("roseinfer.slow_gap", 17),
    ]
    assert events[2].attributes == {
        "roseinfer.cause": "kv_wait",
        "roseinfer.duration_s": 9e-9,
        "roseinfer.index": 3,
        "roseinfer.step_id": 44,
    }


def step(**changes: object) -> StepRecord:
    """4 ms to schedule, 10 to launch, 20 to wait and 2 to commit; what is left over belongs to no part."""
    facts = {
        "step_id": 12,
        "start_ns": 100 * MS,
        "tokens_ns": 135 * MS,
        "end_ns": 138 * MS,
        "h2d_bytes": 640,
        "num_decode_seqs": 2,
        "phases": PhaseTimes(
            schedule=4 * MS, launch=10 * MS, wait=20 * MS, commit=2 * MS, stage=3 * MS, h2d=1 * MS, forward=6 * MS
        ),
    }
    return make_step(**(facts | changes))


def test_a_step_is_a_trace_of_its_own_with_its_parts_and_links_to_its_requests() -> None:
    ids = count(1)
    whole, *children = spans.step_spans(step(), 77, [(5, 6), (7, 8)], True, lambda: next(ids))
    assert (whole.name, whole.trace_id, whole.parent_span_id) == ("roseinfer.step", 77, 0)
    assert (whole.start_ns, whole.end_ns) == (100 * MS, 138 * MS)
    assert whole.links == [(5, 6), (7, 8)]
    assert whole.attributes["roseinfer.step_id"] == 12
    assert whole.attributes["roseinfer.kind"] == "decode"
    assert whole.attributes["roseinfer.is_slow"] is True
    assert "roseinfer.blocked_by" not in whole.attributes
    assert named(children) == {
        "schedule": (100 * MS, 104 * MS),
        "launch": (104 * MS, 114 * MS),
        "stage": (104 * MS, 107 * MS),
        "h2d": (106 * MS, 107 * MS),
        "forward": (107 * MS, 113 * MS),
        "wait": (115 * MS, 135 * MS),
        "commit": (135 * MS, 137 * MS),
    }
    by_name = {child.name: child for child in children}
    assert by_name["roseinfer.h2d"].attributes == {"roseinfer.h2d_bytes": 640}
    assert by_name["roseinfer.h2d"].parent_span_id == by_name["roseinfer.stage"].span_id
    assert by_name["roseinfer.stage"].parent_span_id == by_name["roseinfer.launch"].span_id
    assert by_name["roseinfer.launch"].parent_span_id == whole.span_id
    assert {child.trace_id for child in children} == {77}


def test_parts_that_took_no_time_are_not_told_and_links_are_bounded() -> None:
    ids = count(1)
    idle = step(phases=PhaseTimes(schedule=MS), blocked_by=BlockedBy.KV_BLOCKS)
    whole, *children = spans.step_spans(idle, 77, [(1, i) for i in range(500)], False, lambda: next(ids))
    assert list(named(children)) == ["schedule"]
    assert whole.attributes["roseinfer.blocked_by"] == "kv_blocks"
    assert len(whole.links) == spans.MAX_LINKS


def test_the_startup_is_told_stage_after_stage() -> None:
    ids = count(1)
    whole, *stages = spans.startup_spans(9, (10, 20, 2_000_000_030), {"import": 0.5, "load": 1.5}, lambda: next(ids))
    assert (whole.start_ns, whole.end_ns) == (10, 2_000_000_030)
    assert named(stages) == {
        "startup.import": (20, 500_000_020),
        "startup.load": (500_000_020, 2_000_000_020),
    }
