"""Peaks of a distribution are found where they were put, and planted causes come out with their shares."""

import numpy as np
import pytest

from roseinfer.explain.distribution import Mode, Parts, find_modes
from roseinfer.observe.gaps.causes import Cause
from tests.unit.explain.gaps import make_gap

QUIET = {Cause.DECODE: 9.0, Cause.SCHEDULE: 1.0}
PREFILL = {Cause.DECODE: 9.0, Cause.SCHEDULE: 1.0, Cause.PREFILL_OF_OTHERS: 30.0}
BOTH = PREFILL | {Cause.GC: 10.0}


def spread(centre_s: float, count: int, width: float = 0.03) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Durations around a centre, log-normal, the same ones every time."""
    return np.exp(np.random.default_rng(7).normal(np.log(centre_s), width, count))


def test_two_modes_with_their_shares() -> None:
    modes = find_modes(np.concatenate([spread(0.031, 920), spread(0.074, 80)]))
    assert [mode.share for mode in modes] == [0.92, 0.08]
    assert [mode.seconds for mode in modes] == pytest.approx([0.031, 0.074], rel=0.02)


def test_the_unit_does_not_matter() -> None:
    durations = np.concatenate([spread(1.0, 500), spread(1.5, 500)])
    for scale in (1e-5, 1.0, 100.0):
        assert [mode.share for mode in find_modes(durations * scale)] == [0.5, 0.5]


def test_a_wide_distribution_is_one_mode() -> None:
    assert [mode.share for mode in find_modes(spread(0.02, 2000, width=0.3))] == [1.0]


def test_what_is_rare_is_no_mode() -> None:
    modes = find_modes(np.concatenate([spread(0.01, 998), [0.5, 0.5]]))
    assert [mode.share for mode in modes] == [0.998]


@pytest.mark.parametrize("durations", [[0.02], [0.02] * 50, [0.02, 0.02, 0.02]])
def test_equal_durations_are_one_mode(durations: list[float]) -> None:
    assert find_modes(np.array(durations)) == [Mode(0.02, 1.0)]


def test_a_duration_of_nothing_has_a_logarithm_all_the_same() -> None:
    assert sum(mode.share for mode in find_modes(np.array([0.0] * 10 + [0.01] * 10))) == 1.0


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
