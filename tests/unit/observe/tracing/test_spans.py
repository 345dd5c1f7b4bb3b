"""What a span says: the stamps of the facts, no others."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode

from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.tracing import semconv
from roseinfer.observe.tracing.spans import TraceContext
from roseinfer.records import Api, BlockedBy, FinishReason, PhaseTimes, RequestTimeline, StepRecord
from tests.unit.observe.facts import MS, make_step, make_timeline
from tests.unit.observe.tracing.made import Made, own, parent_id, told


def make_spans(timeline: RequestTimeline, slow_gaps: Iterable[Gap] = ()) -> list[ReadableSpan]:
    made = Made()
    made.spans.of_request(timeline, TraceContext(5, 6, Context(), is_kept=True, slow_gaps=list(slow_gaps)))
    return made.all()


def make_step_spans(
    record: StepRecord, links: Iterable[tuple[int, int]] = (), *, is_slow: bool = False
) -> list[ReadableSpan]:
    made = Made()
    made.spans.of_step(record, [Link(SpanContext(*link, is_remote=False)) for link in links], is_slow=is_slow)
    return made.all()


def named(found: list[ReadableSpan]) -> dict[str, tuple[int | None, int | None]]:
    return {span.name.removeprefix("roseinfer."): (span.start_time, span.end_time) for span in found}


def test_children_have_the_stamps_of_the_timeline_and_leave_no_hole() -> None:
    timeline = make_timeline(api=Api.CHAT)
    whole, *children = make_spans(timeline)
    assert (whole.name, whole.start_time, whole.end_time) == ("chat tiny", timeline.recv_ns, timeline.end_ns)
    assert named(children) == {
        "receive": (timeline.recv_ns, timeline.parsed_ns),
        "tokenize": (timeline.parsed_ns, timeline.tokenized_ns),
        "submit": (timeline.tokenized_ns, timeline.inbox_ns),
        "queue": (timeline.inbox_ns, timeline.scheduled_ns),
        "prefill": (timeline.scheduled_ns, timeline.token_ns[0]),
        "decode": (timeline.token_ns[0], timeline.token_ns[-1]),
        "write": (timeline.token_ns[-1], timeline.write_ns[-1]),
    }
    assert all(earlier.end_time == later.start_time for earlier, later in pairwise(children))
    assert (own(whole).trace_id, own(whole).span_id, whole.parent) == (5, 6, None)
    assert {(own(child).trace_id, parent_id(child)) for child in children} == {(5, 6)}
    assert len({own(span).span_id for span in (whole, *children)}) == 8
    assert whole.kind is SpanKind.SERVER
    assert {child.kind for child in children} == {SpanKind.INTERNAL}


@pytest.mark.parametrize("num_later", [1, 2, 3])
def test_no_part_ends_after_its_request(num_later: int) -> None:
    """Tokens that the engine made before it heard of the end are in none."""
    timeline = make_timeline(finish_reason=FinishReason.ABORT, write_ns=[])
    assert len(timeline.token_ns) == 3
    timeline.end_ns = timeline.token_ns[-num_later] - 1
    whole, *children = make_spans(timeline)
    assert children[-1].end_time == whole.end_time == timeline.end_ns
    assert all(earlier.end_time == later.start_time for earlier, later in pairwise(children))


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
    assert (children[-1].start_time, children[-1].end_time) == (start_ns, timeline.end_ns)


def test_one_token_takes_no_time_to_decode() -> None:
    timeline = make_timeline(token_ns=[1031 * MS], write_ns=[1063 * MS])
    assert list(named(make_spans(timeline)))[-2:] == ["prefill", "write"]
    assert named(make_spans(timeline))["write"] == (1031 * MS, 1063 * MS)


def test_a_token_that_came_after_the_end_ends_no_part_before_it_began() -> None:
    """A client that has gone is told to the engine, which meanwhile makes one more token."""
    timeline = make_timeline(token_ns=[1031 * MS, 1200 * MS], write_ns=[1063 * MS], finish_reason=FinishReason.ABORT)
    found = make_spans(timeline)
    assert all(span.start_time <= span.end_time for span in found if span.start_time and span.end_time)
    assert "decode" not in named(found)
    assert named(found)["write"] == (1031 * MS, 1063 * MS)


def test_attributes_are_those_of_the_conventions_and_unknown_ones_are_absent() -> None:
    timeline = make_timeline(
        api=Api.COMPLETIONS, max_tokens=9, temperature=0.5, top_p=0.9, num_cached_tokens=4, num_preemptions=1
    )
    attributes = told(make_spans(timeline)[0])
    assert attributes[semconv.GEN_AI_OPERATION_NAME] == "text_completion"
    assert attributes[semconv.GEN_AI_REQUEST_MODEL] == "tiny"
    assert attributes[semconv.GEN_AI_REQUEST_MAX_TOKENS] == 9
    assert attributes[semconv.GEN_AI_REQUEST_TEMPERATURE] == 0.5
    assert attributes[semconv.GEN_AI_REQUEST_TOP_P] == 0.9
    assert attributes[semconv.GEN_AI_USAGE_INPUT_TOKENS] == 7
    assert attributes[semconv.GEN_AI_USAGE_OUTPUT_TOKENS] == 3
    assert attributes[semconv.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS] == 4
    assert attributes[semconv.GEN_AI_RESPONSE_FINISH_REASONS] == ("length",)
    assert attributes[semconv.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] == 0.063
    assert attributes["roseinfer.longest_inter_token_latency_s"] == 0.064
    assert attributes["roseinfer.request_id"] == "r-1"
    refused = RequestTimeline(
        request_id="r-2", recv_ns=1, end_ns=5, finish_reason=FinishReason.REJECTED, error_code="invalid_value"
    )
    whole, receive = make_spans(refused)
    assert (whole.name, receive.name) == ("text_completion tiny", "roseinfer.receive")
    assert told(whole)[semconv.ERROR_TYPE] == "invalid_value"
    assert whole.status.is_unset  # the client's mistake
    assert not {semconv.GEN_AI_USAGE_INPUT_TOKENS, semconv.GEN_AI_REQUEST_MAX_TOKENS} & set(told(whole))


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.TIMEOUT])
def test_a_fault_of_the_server_is_an_error(reason: FinishReason) -> None:
    whole = make_spans(make_timeline(finish_reason=reason, error_code="engine_dead"))[0]
    assert (whole.status.status_code, whole.status.description) == (StatusCode.ERROR, "engine_dead")
    assert told(whole)[semconv.ERROR_TYPE] == "engine_dead"


def test_events_are_the_preemption_and_the_longest_slow_gaps() -> None:
    gaps = [Gap(0, 3, 10, 10 + length, 44, {}, Cause.KV_WAIT, True) for length in (9, 8, 7)]
    timeline = make_timeline(preempted_ns=1100 * MS, resumed_ns=1120 * MS)
    events = make_spans(timeline, gaps)[0].events
    assert [(event.name, event.timestamp) for event in events] == [
        ("roseinfer.preempted", 1100 * MS),
        ("roseinfer.resumed", 1120 * MS),
        ("roseinfer.slow_gap", 19),
        ("roseinfer.slow_gap", 18),
        ("roseinfer.slow_gap", 17),
    ]
    assert dict(events[2].attributes or {}) == {
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
    whole, *children = make_step_spans(step(), [(5, 6), (7, 8)], is_slow=True)
    assert (whole.name, whole.parent) == ("roseinfer.step", None)
    assert (whole.start_time, whole.end_time) == (100 * MS, 138 * MS)
    assert [(link.context.trace_id, link.context.span_id) for link in whole.links] == [(5, 6), (7, 8)]
    assert told(whole)["roseinfer.step_id"] == 12
    assert told(whole)["roseinfer.kind"] == "decode"
    assert told(whole)["roseinfer.is_slow"] is True
    assert "roseinfer.blocked_by" not in told(whole)
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
    assert told(by_name["roseinfer.h2d"]) == {"roseinfer.h2d_bytes": 640}
    assert parent_id(by_name["roseinfer.h2d"]) == own(by_name["roseinfer.stage"]).span_id
    assert parent_id(by_name["roseinfer.stage"]) == own(by_name["roseinfer.launch"]).span_id
    assert parent_id(by_name["roseinfer.launch"]) == own(whole).span_id
    assert {own(child).trace_id for child in children} == {own(whole).trace_id}


def test_parts_that_took_no_time_are_not_sent_and_links_are_bounded() -> None:
    idle = step(phases=PhaseTimes(schedule=MS), blocked_by=BlockedBy.KV_BLOCKS)
    whole, *children = make_step_spans(idle, [(1, i) for i in range(1, 501)])
    assert list(named(children)) == ["schedule"]
    assert told(whole)["roseinfer.blocked_by"] == "kv_blocks"
    assert (len(whole.links), whole.dropped_links) == (128, 372)  # the standard's OTEL_SPAN_LINK_COUNT_LIMIT


def test_the_startup_is_traced_stage_after_stage() -> None:
    made = Made()
    made.spans.of_startup((10, 20, 2_000_000_030), {"import": 0.5, "load": 1.5})
    whole, *stages = made.all()
    assert (whole.start_time, whole.end_time) == (10, 2_000_000_030)
    assert named(stages) == {
        "startup.import": (20, 500_000_020),
        "startup.load": (500_000_020, 2_000_000_020),
    }


def test_the_stages_end_with_the_startup_though_the_loading_was_heard_of_late() -> None:
    made = Made()
    made.spans.of_startup((10, 1_000_000_000, 2_000_000_030), {"import": 0.5, "load": 1.5})
    _, *stages = made.all()
    assert [span.end_time for span in stages] == [500_000_030, 2_000_000_030]
