"""Planted causes come out with the shares that were planted."""

import pytest

from roseinfer.explain.shares import Parts
from roseinfer.observe.gaps.causes import Cause
from tests.unit.explain.gaps import make_gap

QUIET = {Cause.DECODE: 9.0, Cause.SCHEDULE: 1.0}
PREFILL = {Cause.DECODE: 9.0, Cause.SCHEDULE: 1.0, Cause.PREFILL_OF_OTHERS: 30.0}
BOTH = PREFILL | {Cause.GC: 10.0}


def test_the_tail_is_split_by_what_was_planted_in_it() -> None:
    parts = Parts([make_gap(QUIET)] * 950 + [make_gap(BOTH)] * 50)
    assert (parts.p50_s, parts.p99_s) == pytest.approx((0.010, 0.050))
    first, second = parts.shares()
    assert (first.cause, second.cause) == (Cause.PREFILL_OF_OTHERS, Cause.GC)
    assert (first.share, second.share) == pytest.approx((0.75, 0.25))
    assert (first.seconds, second.seconds) == pytest.approx((0.030, 0.010))


def test_p99_without_a_cause_is_that_of_the_gaps_without_its_part() -> None:
    parts = Parts([make_gap(QUIET)] * 950 + [make_gap(BOTH)] * 50)
    without = parts.without(Cause.PREFILL_OF_OTHERS)
    assert (without.p99_s, without.saved_s) == pytest.approx((0.020, 0.030))
    assert parts.without(Cause.SCHEDULE).saved_s == pytest.approx(0, abs=1e-9)


def test_the_usual_part_of_a_cause_is_no_excess() -> None:
    """Decoding is most of every gap and yet explains nothing of the tail."""
    parts = Parts([make_gap(QUIET)] * 950 + [make_gap({Cause.DECODE: 9.0, Cause.UNKNOWN: 11.0})] * 50)
    assert [(share.cause, share.share) for share in parts.shares()] == [(Cause.UNKNOWN, 1.0)]


def test_what_took_less_than_usual_has_no_share() -> None:
    parts = Parts([make_gap(QUIET)] * 950 + [make_gap({Cause.DECODE: 9.0, Cause.GC: 31.0})] * 50)
    assert [(share.cause, share.share) for share in parts.shares()] == [(Cause.GC, 1.0)]


def test_gaps_beyond_p99_do_not_speak_for_it() -> None:
    """One monstrous gap in a thousand is no part of p99."""
    gaps = [make_gap(QUIET)] * 949 + [make_gap(PREFILL)] * 50 + [make_gap(QUIET | {Cause.GC: 9000.0})]
    assert [share.cause for share in Parts(gaps).shares()] == [Cause.PREFILL_OF_OTHERS]


def test_the_shares_always_add_up() -> None:
    gaps = [
        make_gap({Cause.DECODE: 5 + i % 7, Cause.GC: float(i % 5), Cause.H2D_COPY: 3.0 - i % 3}) for i in range(500)
    ]
    parts = Parts(gaps)
    assert sum(share.share for share in parts.shares()) == pytest.approx(1)
    assert sum(share.seconds for share in parts.shares()) == pytest.approx(parts.p99_s - parts.p50_s)


@pytest.mark.parametrize("count", [1, 2, 8, 100])
def test_equal_gaps_have_no_tail(count: int) -> None:
    parts = Parts([make_gap(QUIET)] * count)
    assert parts.shares() == []
    assert parts.without(Cause.DECODE).saved_s == 0


def test_a_share_of_all_time_counts_usual_gaps_too() -> None:
    parts = Parts([make_gap({Cause.DECODE: 9.0, Cause.UNKNOWN: 1.0})] * 99 + [make_gap({Cause.GC: 10.0})])
    assert parts.share_of_all(Cause.UNKNOWN) == pytest.approx(0.099)
