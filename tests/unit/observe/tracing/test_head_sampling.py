"""Where a request is in a trace, by its headers, and whether the trace is kept by chance."""

from collections.abc import Mapping

import pytest
from opentelemetry import baggage
from opentelemetry.trace import get_current_span

from roseinfer.errors import ConfigError
from roseinfer.observe.tracing.head_sampling import HeadSampler, make_propagator, make_sampler
from roseinfer.observe.tracing.spans import PlannedIds
from tests.unit.observe.facts import make_timeline
from tests.unit.observe.tracing.made import SHARED

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
RATIO, ARGUMENT = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"


def make_head_sampler(ratio: float = 1.0, environment: Mapping[str, str] | None = None) -> HeadSampler:
    given = environment or {}
    return HeadSampler(make_sampler(given, ratio), make_propagator(given), PlannedIds(), SHARED)


@pytest.mark.parametrize(
    ("header", "is_sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-02", False),  # flags that are not known yet do not matter
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"cc-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", True),
    ],
)
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_caller_of_the_standard_is_the_parent_and_decides(header: str, is_sampled: bool, ratio: float) -> None:
    context = make_head_sampler(ratio).begin(timeline := make_timeline(traceparent=header))
    caller = get_current_span(context.parent).get_span_context()
    assert (timeline.trace_id, f"{caller.span_id:016x}", caller.is_remote) == (TRACE, SPAN, True)
    assert context.is_kept is is_sampled


@pytest.mark.parametrize(
    "header",
    [
        "",
        "bogus",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
    ],
)
def test_any_other_header_is_ignored(header: str) -> None:
    context = make_head_sampler().begin(timeline := make_timeline(traceparent=header))
    assert not get_current_span(context.parent).get_span_context().is_valid
    assert timeline.trace_id == f"{context.trace_id:032x}" != TRACE


def test_the_callers_state_and_baggage_come_along() -> None:
    headers = {"tracestate": "vendor=1,other=2", "baggage": "team=a%20b,plain=c"}
    context = make_head_sampler().begin(make_timeline(traceparent=f"00-{TRACE}-{SPAN}-01", **headers))
    assert dict(get_current_span(context.parent).get_span_context().trace_state) == {"vendor": "1", "other": "2"}
    assert baggage.get_all(context.parent) == {"team": "a b", "plain": "c"}


@pytest.mark.parametrize(
    ("propagators", "has_parent", "num_baggage"), [("tracecontext", True, 0), ("baggage", False, 1), ("none", False, 0)]
)
def test_propagators_can_be_chosen(propagators: str, has_parent: bool, num_baggage: int) -> None:
    sampler = make_head_sampler(environment={"OTEL_PROPAGATORS": propagators})
    context = sampler.begin(make_timeline(traceparent=f"00-{TRACE}-{SPAN}-01", baggage="a=b"))
    assert get_current_span(context.parent).get_span_context().is_valid is has_parent
    assert len(baggage.get_all(context.parent)) == num_baggage


def test_chance_keeps_the_share_that_was_asked_for() -> None:
    sampler = make_head_sampler(0.05)
    num_kept = sum(sampler.begin(make_timeline()).is_kept for _ in range(20_000))
    assert 800 < num_kept < 1200  # six standard deviations are 185


def test_the_sequences_of_one_request_are_one_trace_and_are_decided_alike() -> None:
    sampler = make_head_sampler(0.5)
    for _ in range(50):
        first = sampler.begin(timeline := make_timeline())
        second = sampler.begin(make_timeline(trace_id=timeline.trace_id))
        assert (first.trace_id, first.is_kept) == (second.trace_id, second.is_kept)
        assert first.span_id != second.span_id


@pytest.mark.parametrize(
    ("environment", "alone", "under_a_caller_that_does_not_keep"),
    [
        ({RATIO: "always_on"}, True, True),
        ({RATIO: "always_off"}, False, False),
        ({RATIO: "parentbased_always_on"}, True, False),
        ({RATIO: "parentbased_always_off"}, False, False),
        ({RATIO: "traceidratio", ARGUMENT: "1"}, True, True),
        ({RATIO: "traceidratio", ARGUMENT: "0"}, False, False),
        ({RATIO: "parentbased_traceidratio"}, True, False),  # the standard's argument is 1, whatever our option
        ({RATIO: " ParentBased_TraceIdRatio ", ARGUMENT: "0.0"}, False, False),
        ({ARGUMENT: "1.0"}, True, False),  # in the place of our option
        ({}, False, False),
        ({RATIO: "", ARGUMENT: ""}, False, False),  # empty is not set
    ],
)
def test_the_samplers_of_the_standard(
    environment: Mapping[str, str], alone: bool, under_a_caller_that_does_not_keep: bool
) -> None:
    sampler = make_head_sampler(0.0, environment)
    assert sampler.begin(make_timeline()).is_kept is alone
    called = sampler.begin(make_timeline(traceparent=f"00-{TRACE}-{SPAN}-00"))
    assert called.is_kept is under_a_caller_that_does_not_keep


@pytest.mark.parametrize(
    ("environment", "param"),
    [
        ({RATIO: "sometimes"}, RATIO),
        ({RATIO: "traceidratio", ARGUMENT: "much"}, ARGUMENT),
        ({RATIO: "traceidratio", ARGUMENT: "1.5"}, ARGUMENT),
        ({ARGUMENT: "nan"}, ARGUMENT),
        ({"OTEL_PROPAGATORS": "tracecontext,pigeon"}, "OTEL_PROPAGATORS"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(environment: Mapping[str, str], param: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_head_sampler(0.5, environment)
    assert refusal.value.param == param
