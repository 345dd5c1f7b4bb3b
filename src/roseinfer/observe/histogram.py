"""Values in, bucket counts out; knows nothing of what is counted or who reads it.

prometheus_client's own histogram searches its buckets one by one and locks for each value; this one bisects, and its
owner decides about locking.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate


class Histogram:
    """Counts of values by upper bound (inclusive, as Prometheus has it), the last bucket being unbounded."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, values: Iterable[float]) -> int:
        """Count the values; returns how many were refused because they are negative or not finite.

        A negative latency is a mistake in a stamp. Clamping it to zero would make the mistake look like speed, and
        one NaN would make the sum NaN for the life of the process.
        """
        bounds, counts, total, num_refused = self.bounds, self.counts, 0.0, 0
        last, index = math.nan, 0
        for value in values:
            if value != last:  # the streams of a step share their gap, so most values are the one before
                if not 0.0 <= value < math.inf:
                    num_refused += 1
                    continue
                last, index = value, bisect_left(bounds, value)
            counts[index] += 1
            total += value
        self.total += total
        return num_refused

    def copy(self) -> "Histogram":
        twin = Histogram(self.bounds)
        twin.counts = self.counts.copy()
        twin.total = self.total
        return twin

    def cumulative_counts(self) -> list[int]:
        """Per bound, how many values were at most that large; the last one is the number of values."""
        return list(accumulate(self.counts))

    def quantile(self, q: float) -> float | None:
        """The q-quantile, linear within its bucket as in PromQL's `histogram_quantile`; None without values.

        A value above the last bound is told as that bound.
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
