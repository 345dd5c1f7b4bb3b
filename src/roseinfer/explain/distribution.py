"""The distribution of gaps: its modes, which causes make p99 longer than p50, and p99 without each of them.

docs/explain.md gives the method, under "The method". The counterfactual takes from every gap what one cause took above
its usual part, and takes p99 again: causes that overlap in a gap save less one by one than together.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from roseinfer.observe.gaps.causes import CAUSES, Cause
from roseinfer.observe.gaps.request_gaps import Gap

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

KERNEL_WIDTH = 0.08  # standard deviation, in units of the natural logarithm
VALLEY = 0.5  # of the lower of two peaks: a shallower valley does not divide them
LEAST_SHARE = 0.005
LEAST_MEMBERS = 3

_POINTS_PER_KERNEL = 8
_REACH = 4  # kernel widths beyond which a kernel is nothing
_SHORTEST_S = 1e-6

_MIDDLE = (0.4, 0.6)
_TAIL = 0.99
_TAIL_WIDTH = 0.005
_LEAST_GAPS = 9  # that vote; where fewer are slow, others have a vote too


class Mode(msgspec.Struct, frozen=True):
    """One peak of a distribution."""

    seconds: float  # the median of its members
    share: float  # of all durations


def find_modes(durations_s: FloatArray) -> list[Mode]:
    """Returns the modes of durations in seconds, [n] with n >= 1, the one with most members first."""
    logarithms = np.log(np.maximum(durations_s, _SHORTEST_S))
    centres, density = _density(logarithms)
    edges = np.array([-np.inf, *(centres[valley] for valley in _valleys(density)), np.inf])
    places = np.searchsorted(edges, logarithms, side="right") - 1
    modes = []
    for place in range(len(edges) - 1):
        members = durations_s[places == place]
        if len(members) >= min(LEAST_MEMBERS, len(durations_s)) and len(members) >= LEAST_SHARE * len(durations_s):
            modes.append(Mode(float(np.median(members)), len(members) / len(durations_s)))
    return sorted(modes, key=lambda mode: -mode.share)


def _density(logarithms: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns the centres of a grid and, up to a factor, the density there."""
    step, margin = KERNEL_WIDTH / _POINTS_PER_KERNEL, KERNEL_WIDTH * (_REACH + 1)
    edges = np.arange(logarithms.min() - margin, logarithms.max() + margin + step, step)
    counts, _ = np.histogram(logarithms, edges)
    offsets = np.arange(-_REACH * _POINTS_PER_KERNEL, _REACH * _POINTS_PER_KERNEL + 1) / _POINTS_PER_KERNEL
    density: FloatArray = np.convolve(counts, np.exp(-(offsets**2) / 2), mode="same")
    return (edges[:-1] + edges[1:]) / 2, density


def _valleys(density: FloatArray) -> list[int]:
    """Returns the places where the density is lowest between two peaks that a valley divides."""
    inner = density[1:-1]
    peaks = [int(place) + 1 for place in ((inner > density[:-2]) & (inner >= density[2:])).nonzero()[0]]
    while len(peaks) > 1:
        valleys = [left + int(density[left : right + 1].argmin()) for left, right in pairwise(peaks)]
        depths = [
            float(density[valley] / min(density[left], density[right]))
            for left, valley, right in zip(peaks[:-1], valleys, peaks[1:], strict=True)
        ]
        shallowest = int(np.argmax(depths))
        if depths[shallowest] <= VALLEY:
            return valleys
        lower = shallowest if density[peaks[shallowest]] < density[peaks[shallowest + 1]] else shallowest + 1
        del peaks[lower]
    return []


class CauseShare(msgspec.Struct, frozen=True):
    """How much of p99 - p50 a cause explains."""

    cause: Cause
    seconds: float
    share: float


class Without(msgspec.Struct, frozen=True):
    """p99 if a cause never took longer than usual."""

    cause: Cause
    p99_s: float
    saved_s: float


class Parts:
    """Gaps as a table, in the order of their durations: durations [gaps] in seconds, parts [gaps, causes] in ns."""

    def __init__(self, gaps: Sequence[Gap]) -> None:
        """`gaps` must not be empty."""
        table = np.zeros((len(gaps), len(CAUSES)))
        for row, gap in enumerate(gaps):
            for cause, part_ns in gap.parts.items():
                table[row, cause.number] = part_ns
        durations = np.array([(gap.end_ns - gap.start_ns) / 1e9 for gap in gaps])
        order = durations.argsort(kind="stable")
        self.durations_s: FloatArray = durations[order]
        self._table: FloatArray = table[order]
        is_slow: BoolArray = np.array([gap.is_slow for gap in gaps])[order]
        self.p50_s, self.p99_s = (float(value) for value in np.quantile(durations, (0.5, _TAIL)))
        self._usual: FloatArray = self._table[self._between(*_MIDDLE)].mean(axis=0)
        tail = self._between(_TAIL - _TAIL_WIDTH, _TAIL + _TAIL_WIDTH)
        excess = self._table[tail] - self._usual
        excess[excess < 1] = 0  # less than a nanosecond is rounding
        has_vote = excess.any(axis=1)
        # Of the gaps around p99 with anything above the usual: excess [gaps, causes] in ns, and which are slow [gaps].
        self.excess, self.is_slow = excess[has_vote], is_slow[tail][has_vote]

    def _between(self, low: float, high: float) -> slice:
        """Returns the rows of the gaps between two ranks."""
        count = len(self.durations_s)
        wanted = min(count, max(_LEAST_GAPS, math.ceil((high - low) * count)))
        begin = round((low + high) / 2 * (count - 1) - (wanted - 1) / 2)
        begin = min(max(begin, 0), count - wanted)
        return slice(begin, begin + wanted)

    def shares(self) -> list[CauseShare]:
        """Returns each cause with a share, the largest first; nothing where p99 is no longer than p50."""
        excess, spread_s = self.excess, self.p99_s - self.p50_s
        if spread_s <= 0 or not len(excess):
            return []
        shares = (excess / excess.sum(axis=1, keepdims=True)).mean(axis=0)
        found = [
            CauseShare(cause, float(share) * spread_s, float(share))
            for cause, share in zip(CAUSES, shares, strict=True)
            if share > 0
        ]
        return sorted(found, key=lambda share: -share.share)

    def share_of_all(self, cause: Cause) -> float:
        """Returns the share of a cause in the time of all gaps, usual or not."""
        total_ns = self._table.sum()
        return float(self._table[:, cause.number].sum() / total_ns) if total_ns else 0.0

    def without(self, cause: Cause) -> Without:
        """Returns p99 if the cause had never taken longer than usual."""
        shorter = self.durations_s - np.maximum(self._table[:, cause.number] - self._usual[cause.number], 0) / 1e9
        p99_s = float(np.quantile(shorter, _TAIL))
        return Without(cause, p99_s, self.p99_s - p99_s)
