"""Counting into buckets against counting by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.observe.metrics.histogram import Histogram

BOUNDS = (0.001, 0.0025, 0.01, 1.0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.floats(min_value=0, max_value=5), st.sampled_from(BOUNDS))))
def test_buckets_count_what_is_at_most_their_bound(values: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    assert histogram.add(values) == 0
    by_hand = [sum(value <= bound for value in values) for bound in BOUNDS]
    assert histogram.cumulative_counts() == [*by_hand, len(values)]
    assert histogram.total == pytest.approx(sum(values))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.floats(min_value=-1, max_value=5), st.sampled_from([*BOUNDS, math.nan, math.inf]))))
def test_an_array_is_counted_as_its_values_are(values: list[float]) -> None:
    one_by_one, together = Histogram(BOUNDS), Histogram(BOUNDS)
    assert together.add_array(np.array(values, np.float64)) == one_by_one.add(values)
    assert together.counts == one_by_one.counts
    assert together.total == pytest.approx(one_by_one.total)
    assert sum(together.exponents.values()) + together.num_zeros == sum(together.counts)
    assert together.num_zeros == one_by_one.num_zeros


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([*BOUNDS, 7.0, -1.0]), st.integers(0, 5))
def test_equal_values_are_counted_as_often_as_they_are_there(value: float, count: int) -> None:
    histogram = Histogram(BOUNDS)
    num_refused = histogram.add([value] * count)
    assert num_refused == (count if value < 0 else 0)
    assert sum(histogram.counts) == count - num_refused
    assert histogram.total == pytest.approx(0.0 if num_refused else value * count)


def test_nanoseconds_on_a_bound_fall_into_its_bucket() -> None:
    histogram = Histogram(BOUNDS)
    histogram.add([2_500_000 / 1e9])
    assert histogram.counts == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, -math.inf])
def test_what_cannot_be_a_duration_is_refused_in_words(value: float) -> None:
    histogram = Histogram(BOUNDS)
    assert histogram.add([0.5, value, 0.25]) == 1
    assert sum(histogram.counts) == 2
    assert histogram.total == 0.75


def test_a_copy_does_not_change_with_the_original() -> None:
    histogram = Histogram(BOUNDS)
    histogram.add([0.5])
    twin = histogram.copy()
    histogram.add([0.5])
    assert (twin.total, twin.counts) == (0.5, [0, 0, 0, 1, 0])


def test_a_quantile_of_nothing_is_unknown() -> None:
    assert Histogram(BOUNDS).quantile(0.5) is None


def test_a_quantile_is_linear_within_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    histogram.add([1.5, 1.5, 3.0, 3.0])
    assert histogram.quantile(0.0) == 1.0
    assert histogram.quantile(0.25) == 1.5
    assert histogram.quantile(0.5) == 2.0
    assert histogram.quantile(0.75) == 3.0
    assert histogram.quantile(1.0) == 4.0


def test_a_quantile_past_the_last_bound_is_that_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.add([5.0])
    assert histogram.quantile(0.5) == 2.0


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(min_value=1e-4, max_value=10), min_size=1, max_size=200), st.floats(min_value=0.01, max_value=1)
)
def test_a_quantile_is_off_by_at_most_one_bucket(values: list[float], q: float) -> None:
    histogram = Histogram([1e-5 * 1.05**i for i in range(331)])
    histogram.add(values)
    exact = sorted(values)[math.ceil(q * len(values)) - 1]
    estimate = histogram.quantile(q)
    assert estimate is not None
    assert exact / 1.06 <= estimate <= exact * 1.06
