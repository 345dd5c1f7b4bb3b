"""Learns from recent steps what computing a step of some size usually takes; the fit also serves the simulation.

The model of a decode step is `a + b * rows + c * context tokens`, fitted to recent steps that did nothing but decode.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from roseinfer.records import StepRecord

FloatArray = npt.NDArray[np.float64]

_WINDOW = 256  # steps that are remembered
_REFIT_EVERY = 64  # learned steps; a fit takes as long as half a millisecond
_MIN_STEPS = 4
_OUTLIER = 3.0  # times the median residual, beyond which a step has no part in the fit
_CLOSE = 0.5  # of what is expected: a step as near as that always has its part
_RIDGE = 1e-7  # on normalised features: rows and contexts that never change must not make the fit singular


class Fit(NamedTuple):
    """Coefficients [columns] of the features, and which rows [rows] had a part in them."""

    coefficients: FloatArray
    is_used: npt.NDArray[np.bool_]


def fit_costs(features: FloatArray, times_ns: FloatArray, outlier: float, close: float = 0.0) -> Fit:
    """Fits non-negative coefficients to features [rows, columns] and times [rows], then again without the outliers.

    A row is an outlier when it misses the first fit by more than `outlier` times the median residual, and by more than
    `close` of what the fit expects.
    """
    coefficients = _non_negative_least_squares(features, times_ns)
    expected = features @ coefficients
    residuals = np.abs(expected - times_ns)
    is_used = residuals <= np.maximum(outlier * max(float(np.median(residuals)), 1.0), close * expected)
    if not is_used.all():
        coefficients = _non_negative_least_squares(features[is_used], times_ns[is_used])
    return Fit(coefficients, is_used)


def _non_negative_least_squares(features: FloatArray, times_ns: FloatArray) -> FloatArray:
    """Returns coefficients [columns] of which none is negative; the first column of the features must be all ones."""
    columns, means, mean_ns = features[:, 1:], features[:, 1:].mean(axis=0), float(times_ns.mean())
    slopes = _non_negative_slopes(columns - means, times_ns - mean_ns)
    constant = mean_ns - float(slopes @ means)
    if constant < 0:
        constant, slopes = 0.0, _non_negative_slopes(columns, times_ns)
    return np.concatenate(([constant], slopes))


def _non_negative_slopes(columns: FloatArray, times_ns: FloatArray) -> FloatArray:
    """Returns least-squares slopes [columns]; columns whose slopes come out negative are left out, and get 0."""
    scales = np.sqrt(np.square(columns).mean(axis=0))
    is_used = scales > 0
    slopes = np.zeros(len(scales))
    while is_used.any():
        normalised = columns[:, is_used] / scales[is_used]
        gram = normalised.T @ normalised + _RIDGE * len(times_ns) * np.eye(is_used.sum())
        slopes[is_used] = np.linalg.solve(gram, normalised.T @ times_ns) / scales[is_used]
        if (slopes >= 0).all():
            break
        is_used &= slopes > 0
        slopes[~is_used] = 0.0
    return slopes


class StepCosts:
    """What recent decode steps say of the next one."""

    def __init__(self) -> None:
        self._features: npt.NDArray[np.float64] = np.ones((_WINDOW, 3))
        self._compute_ns: npt.NDArray[np.float64] = np.zeros(_WINDOW)
        self._num_learned = 0
        self._coefficients: tuple[float, float, float] | None = None
        self._max_rows = 0  # of the steps in the fit

    def learn(self, record: StepRecord, compute_ns: int) -> None:
        """Learns from a step that did nothing but decode."""
        at = self._num_learned % _WINDOW
        self._features[at, 1], self._features[at, 2] = rows_of(record), record.num_context_tokens
        self._compute_ns[at] = compute_ns
        self._num_learned += 1
        is_new = rows_of(record) > self._max_rows
        if is_new or self._num_learned < 2 * _MIN_STEPS or self._num_learned % _REFIT_EVERY == 0:
            self._fit()

    def knows(self, num_rows: int) -> bool:
        """Returns whether steps of so many rows were in the fit."""
        return num_rows <= self._max_rows

    def expected_ns(self, num_rows: int, num_context_tokens: int) -> int | None:
        """Returns the nanoseconds of a decode step of that size; None before there is experience."""
        if self._coefficients is None:
            return None
        constant, per_row, per_token = self._coefficients
        return max(0, round(constant + per_row * num_rows + per_token * num_context_tokens))

    def _fit(self) -> None:
        count = min(self._num_learned, _WINDOW)
        if count < _MIN_STEPS:
            return
        features = self._features[:count]
        constant, per_row, per_token = fit_costs(features, self._compute_ns[:count], _OUTLIER, _CLOSE)[0].tolist()
        self._max_rows = int(features[:, 1].max())
        self._coefficients = constant, per_row, per_token


def rows_of(record: StepRecord) -> int:
    """Returns the decode rows that the device computes, drafts included; with a graph, those of the graph."""
    return max(record.num_decode_seqs + record.num_draft_tokens, record.graph_rows)
