"""Who the parent is, and whether chance keeps a trace."""

import random

import pytest

from roseinfer.observe.tracing.trace_sampling import Parent, Sampler, parse_traceparent
from tests.unit.observe.facts import make_timeline

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


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
def test_a_traceparent_in_the_form_of_the_standard_is_the_parent(header: str, is_sampled: bool) -> None:
    assert parse_traceparent(header) == Parent(int(TRACE, 16), int(SPAN, 16), is_sampled)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "bogus",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-",
        f"00-{TRACE}-{SPAN}-01-more",
        f"cc-{TRACE}-{SPAN}-01more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE}-{SPAN}-１",
    ],
)
def test_any_other_is_ignored(header: str) -> None:
    assert parse_traceparent(header) is None
    context = Sampler(1.0, random.Random(1)).begin(timeline := make_timeline(traceparent=header))
    assert context.parent_span_id == 0
    assert timeline.trace_id == f"{context.trace_id:032x}" != TRACE


@pytest.mark.parametrize(("flags", "is_kept"), [("00", False), ("01", True)])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_parent_decides_and_not_the_ratio(flags: str, is_kept: bool, ratio: float) -> None:
    timeline = make_timeline(traceparent=f"00-{TRACE}-{SPAN}-{flags}")
    context = Sampler(ratio, random.Random(1)).begin(timeline)
    assert (timeline.trace_id, context.parent_span_id) == (TRACE, int(SPAN, 16))
    assert context.is_kept is is_kept


def test_chance_keeps_the_share_that_was_asked_for() -> None:
    sampler = Sampler(0.05, random.Random(7))
    num_kept = sum(sampler.begin(make_timeline()).is_kept for _ in range(20_000))
    assert 900 < num_kept < 1100  # four standard deviations are 123


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, {False}), (1.0, {True})])
def test_none_and_all_are_none_and_all(ratio: float, expected: set[bool]) -> None:
    sampler = Sampler(ratio, random.Random(3))
    assert {sampler.begin(make_timeline()).is_kept for _ in range(500)} == expected


def test_the_sequences_of_one_request_are_one_trace_and_are_decided_alike() -> None:
    sampler = Sampler(0.5, random.Random(3))
    for _ in range(50):
        first = sampler.begin(timeline := make_timeline())
        second = sampler.begin(make_timeline(trace_id=timeline.trace_id))
        assert (first.trace_id, first.is_kept) == (second.trace_id, second.is_kept)
        assert first.span_id != second.span_id
