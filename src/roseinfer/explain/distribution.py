"""Durations into the modes of their distribution, found on a logarithmic scale. Knows nothing of what took so long.

The density of the logarithms is estimated with a Gaussian kernel, eight per cent of a duration wide whatever the
duration is. Two peaks are two modes if the density between them falls below half of the lower one; a duration belongs
to the peak on its side of the valley. Peaks with few members are no modes: what lies there is scattered.
"""

from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

KERNEL_WIDTH = 0.08  # standard deviation, in units of the natural logarithm
VALLEY = 0.5  # of the lower of two peaks: a shallower valley does not divide them
LEAST_SHARE = 0.005
LEAST_MEMBERS = 3

_POINTS_PER_KERNEL = 8
_REACH = 4  # kernel widths beyond which a kernel is nothing
_SHORTEST_S = 1e-6


class Mode(msgspec.Struct, frozen=True):
    """One peak of a distribution."""

    seconds: float  # the median of its members
    share: float  # of all durations


def find_modes(durations_s: FloatArray) -> list[Mode]:
    """The modes of durations in seconds, [n] with n >= 1, the one with most members first."""
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
    """Centres of a grid and, up to a factor, the density there."""
    step, margin = KERNEL_WIDTH / _POINTS_PER_KERNEL, KERNEL_WIDTH * (_REACH + 1)
    edges = np.arange(logarithms.min() - margin, logarithms.max() + margin + step, step)
    counts, _ = np.histogram(logarithms, edges)
    offsets = np.arange(-_REACH * _POINTS_PER_KERNEL, _REACH * _POINTS_PER_KERNEL + 1) / _POINTS_PER_KERNEL
    density: FloatArray = np.convolve(counts, np.exp(-(offsets**2) / 2), mode="same")
    return (edges[:-1] + edges[1:]) / 2, density


def _valleys(density: FloatArray) -> list[int]:
    """Where the density is lowest between two peaks that a valley divides."""
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
