"""What a living server tells of causes when it is asked later than usual."""

import pytest

from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.gaps.step_gaps import StepGap, StepGaps
from roseinfer.records import FinishReason, RequestTimeline
from tests.unit.observe.facts import MS
from tests.unit.observe.gaps.test_request_gaps import Bench


def test_a_listener_that_fails_costs_neither_the_causes_nor_other_listeners(caplog: pytest.LogCaptureFixture) -> None:
    def fail(gap: Gap, timeline: RequestTimeline) -> None:
        raise RuntimeError("no space")

    bench = Bench()
    told = bench.slow
    bench.attribution.on_slow_gap.append(fail)
    bench.attribution.on_slow_gap.append(lambda gap, timeline: told.append((gap, timeline)))
    bench.warm_up()
    for _ in range(2):
        bench.step(parts={"h2d": 80 * MS})
        bench.step()
    assert len(told) == 2 * 2 * bench.num_streams
    assert bench.attribution.num_slow_gaps[Cause.H2D_COPY] == 2 * bench.num_streams
    assert len(caplog.records) == 1


def test_a_ledger_that_is_asked_for_late_still_names_causes() -> None:
    """A stream whose client is slow ends when its last step has long been forgotten."""
    bench = Bench()
    bench.warm_up()
    slow, *others = bench.timelines
    slow.finish_reason = FinishReason.LENGTH  # the front end knows it before observers are told of the step
    bench.step(num_finished=1)
    told = bench.attribution.decode_ns(slow)
    assert told[Cause.DECODE] > 0
    for _ in range(1100):
        bench.step(rows=others)
    assert bench.attribution.decode_ns(slow) == told


def test_of_requests_that_have_ended_nothing_is_kept() -> None:
    bench = Bench()
    bench.warm_up()
    for timeline in bench.timelines:
        bench.hub.on_finish(timeline)
    assert not bench.attribution._accounts


def test_the_oldest_steps_are_forgotten() -> None:
    gaps = StepGaps()
    for at_ns in range(100):
        gaps.add(StepGap(at_ns, at_ns + 1, at_ns, ()), 10)
        known = [end_ns for end_ns in range(1, at_ns + 2) if gaps.ended_at(end_ns) is not None]
        assert known == list(range(1, at_ns + 2))[-len(known) :], "the newest"
        assert min(at_ns + 1, 10) <= len(known) <= 20
