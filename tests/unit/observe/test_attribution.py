"""What a living server tells of causes when it is asked later than usual."""

from roseinfer.records import Cause, FinishReason
from tests.unit.observe.test_causes import Bench


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
