"""Counts values by buckets, and the bucket bounds of all metrics.

prometheus_client's own histogram searches its buckets one by one and locks for each value; this one bisects, and its
owner decides about locking.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

# Upper bounds; an unbounded bucket follows. Each agreed threshold of a service level is a bound, so that its share of
# good events is exact.
HOST_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
WAIT_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.32, 0.5, 0.64),
    *(1.0, 1.28, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0),
)
TOKEN_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
)
REQUEST_S = (*(round(0.01 * 2**i, 2) for i in range(14)), 120.0, 240.0, 480.0, 960.0)
# Exponential buckets, as Prometheus' native histograms and OpenTelemetry have them: bucket i ends at 2**(i / 8).
SCHEMA = 3
ZERO_THRESHOLD = 2.0**-128  # Prometheus' own; what is at most that large is in no bucket
_PER_OCTAVE = 2**SCHEMA

TOKENS = tuple(float(4**i) for i in range(10))
SEQUENCES = tuple(float(2**i) for i in range(10))


@cache
def _edges(bounds: tuple[float, ...]) -> npt.NDArray[np.float64]:
    return np.array(bounds, np.float64)


class Histogram:
    """Counts of values by upper bound (inclusive, as Prometheus has it), the last bucket being unbounded.

    With bounds it counts by exponential buckets, too: `exponents` has their index and count where there is one.
    """

    __slots__ = ("bounds", "counts", "exponents", "num_zeros", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self.exponents: dict[int, int] = {}
        self.num_zeros = 0

    def add(self, values: Sequence[float]) -> int:
        """Counts the values; returns how many were refused because they are negative or not finite.

        A negative latency is a mistake in a stamp. Clamping it to zero would make the mistake look like speed, and
        one NaN would make the sum NaN for the life of the process.
        """
        if values and values.count(values[0]) == len(values):  # as the streams of a step, which share their gap
            return self._add_times(values[0], len(values))
        return sum(self._add_times(value, count) for value, count in Counter(values).items())

    def _add_times(self, value: float, count: int) -> int:
        if not 0.0 <= value < math.inf:
            return count
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count
        if self.bounds:
            self._add_exponent(math.ceil(math.log2(value) * _PER_OCTAVE) if value > ZERO_THRESHOLD else None, count)
        return 0

    def _add_exponent(self, index: int | None, count: int) -> None:
        if index is None:
            self.num_zeros += count
        else:
            self.exponents[index] = self.exponents.get(index, 0) + count

    def add_array(self, values: npt.NDArray[np.float64]) -> int:
        """Counts many values, all of them different; returns how many were refused."""
        is_taken = (values >= 0.0) & (values < math.inf)
        taken = values[is_taken]
        for index, count in enumerate(np.bincount(np.searchsorted(_edges(self.bounds), taken)).tolist()):
            self.counts[index] += count
        self.total += float(taken.sum())
        positive = taken[taken > ZERO_THRESHOLD]
        self.num_zeros += len(taken) - len(positive)
        if len(positive):
            exponents = np.ceil(np.log2(positive) * _PER_OCTAVE).astype(np.int64)
            first = int(exponents.min())
            for exponent, count in enumerate(np.bincount(exponents - first).tolist(), first):
                if count:
                    self._add_exponent(exponent, count)
        return len(values) - len(taken)

    def copy(self) -> "Histogram":
        twin = Histogram(self.bounds)
        twin.counts = self.counts.copy()
        twin.total = self.total
        twin.exponents, twin.num_zeros = self.exponents.copy(), self.num_zeros
        return twin

    def is_as(self, twin: "Histogram | None") -> bool:
        """Returns whether nothing was counted since it had this copy."""
        return twin is not None and twin.counts == self.counts

    def cumulative_counts(self) -> list[int]:
        """Returns per bound how many values were at most that large; the last is the number of values."""
        return list(accumulate(self.counts))

    def quantile(self, q: float) -> float | None:
        """Returns the q-quantile, linear within its bucket as in PromQL's `histogram_quantile`; None without values.

        A value above the last bound counts as that bound.
        """
        cumulative = self.cumulative_counts()
        if not cumulative[-1]:
            return None
        rank = q * cumulative[-1]
        index = bisect_left(cumulative, rank) if rank else next(i for i, count in enumerate(self.counts) if count)
        if index == len(self.bounds):
            return self.bounds[-1]
        lower = self.bounds[index - 1] if index else 0.0
        below = cumulative[index - 1] if index else 0
        return lower + (self.bounds[index] - lower) * (rank - below) / self.counts[index]
