"""Gaps into what their tail consists of: which cause makes p99 longer than p50, and p99 without it.

A gap's parts add up to it, so profiles do too. The usual profile is the mean of each cause's part over the gaps in the
middle of the order (ranks 40 to 60 %), the tail's profile is the same over those around p99 (half a per cent of the
ranks on either side, and at least nine gaps). What a cause takes longer in the tail than usually is its excess. Excess
below zero counts as none, and the rest is scaled so that it adds up to p99 - p50.

The counterfactual takes from every gap what one cause took above its usual part, and takes p99 again. Causes that
overlap in a gap save less one by one than together, so the savings need not add up to anything.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from roseinfer.observe.causes import Gap
from roseinfer.observe.recording import CAUSES
from roseinfer.records import Cause

FloatArray = npt.NDArray[np.float64]

_MIDDLE = (0.4, 0.6)
_TAIL = 0.99
_TAIL_WIDTH = 0.005
_LEAST_GAPS = 9


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
        """There is at least one gap."""
        table = np.zeros((len(gaps), len(CAUSES)))
        columns = {cause: column for column, cause in enumerate(CAUSES)}
        for row, gap in enumerate(gaps):
            for cause, part_ns in gap.parts.items():
                table[row, columns[cause]] = part_ns
        durations = np.array([(gap.end_ns - gap.start_ns) / 1e9 for gap in gaps])
        order = durations.argsort(kind="stable")
        self.durations_s: FloatArray = durations[order]
        self._table: FloatArray = table[order]
        self.p50_s, self.p99_s = (float(value) for value in np.quantile(durations, (0.5, _TAIL)))
        self._usual = self._profile(*_MIDDLE)

    def _profile(self, low: float, high: float) -> FloatArray:
        """Mean part of each cause in ns, [causes], over the gaps between two ranks."""
        count = len(self.durations_s)
        wanted = min(count, max(_LEAST_GAPS, math.ceil((high - low) * count)))
        begin = round((low + high) / 2 * (count - 1) - (wanted - 1) / 2)
        begin = min(max(begin, 0), count - wanted)
        profile: FloatArray = self._table[begin : begin + wanted].mean(axis=0)
        return profile

    def shares(self) -> list[CauseShare]:
        """Each cause with a share, the largest first; nothing where p99 is no longer than p50."""
        excess = self._profile(_TAIL - _TAIL_WIDTH, _TAIL + _TAIL_WIDTH) - self._usual
        excess[excess < 1] = 0  # less than a nanosecond is rounding
        spread_s, total = self.p99_s - self.p50_s, float(excess.sum())
        if spread_s <= 0 or total <= 0:
            return []
        found = [
            CauseShare(cause, float(part) / total * spread_s, float(part) / total)
            for cause, part in zip(CAUSES, excess, strict=True)
            if part > 0
        ]
        return sorted(found, key=lambda share: -share.share)

    def without(self, cause: Cause) -> Without:
        """The counterfactual."""
        column = CAUSES.index(cause)
        shorter = self.durations_s - np.maximum(self._table[:, column] - self._usual[column], 0) / 1e9
        p99_s = float(np.quantile(shorter, _TAIL))
        return Without(cause, p99_s, self.p99_s - p99_s)
