"""Peaks of a distribution are found where they were put, and no others."""

import numpy as np
import pytest

from roseinfer.explain.distribution import Mode, find_modes


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
