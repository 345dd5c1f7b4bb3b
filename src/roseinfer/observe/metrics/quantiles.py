"""Medians and quantiles on the event loop: numpy's own import `numpy.ma` when first called, 20 ms of a first answer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def median(values: npt.NDArray[Any]) -> float:
    """Of one dimension, not empty; by a partial sort: what np.median does around it takes longer than that."""
    low, high = (len(values) - 1) // 2, len(values) // 2
    parted = np.partition(values, (low, high))
    return (float(parted[low]) + float(parted[high])) / 2


def quantiles(values: npt.NDArray[Any], shares: Sequence[float]) -> list[float]:
    """Of one dimension, not empty, at shares from 0 to 1; between two values linearly, as np.quantile does."""
    ranks = np.linspace(0.0, 1.0, len(values))
    return [float(value) for value in np.interp(shares, ranks, np.sort(values))]
