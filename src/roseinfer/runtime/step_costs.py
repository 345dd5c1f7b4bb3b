"""Learns from recent steps what a step of some size takes: for the causes of gaps, the scheduler and the simulation.

A step takes a constant, so much for each decode row, for each prompt token, and for each token that attention reads
from the KV cache; none of them can be negative.
"""

from typing import NamedTuple

import numpy as np
import numpy.ma
import numpy.typing as npt

from roseinfer.records import StepRecord

FloatArray = npt.NDArray[np.float64]

_WINDOW = 256  # steps that are remembered
_REFIT_EVERY = 16  # learned steps; a fit takes 50 microseconds
_MIN_STEPS = 4
_OUTLIER = 3.0  # times the median residual, beyond which a step has no part in the fit
_CLOSE = 0.5  # of what is expected: a step as near as that always has its part
_ROWS_WORTH_A_STEP = 10.0  # while nothing else is known: the rows, or prompt tokens, that cost as much as all the rest
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


class StepSize(NamedTuple):
    """What a step computes, as far as its time depends on it."""

    num_rows: int  # that decode, drafts included
    num_prompt_tokens: int
    num_context_tokens: int  # that attention reads from the KV cache


class StepCosts:
    """What recent steps say of the next one."""

    def __init__(self) -> None:
        self._steps: FloatArray = np.ones((_WINDOW, 2 + len(StepSize._fields)))  # 1, size and nanoseconds of each
        self._num_learned = 0
        self._coefficients: list[float] | None = None
        self._variances: list[float] = []  # of the features
        self._largest = StepSize(0, 0, 0)  # of the steps in the fit, each number for itself

    def learn(self, size: StepSize, duration_ns: int) -> None:
        """Learns how long a step took. One that took many times as long as the fit says is left out of it."""
        self._steps[self._num_learned % _WINDOW] = (1, *size, duration_ns)
        self._num_learned += 1
        is_new = not self.knows(size)
        if is_new or self._num_learned < 2 * _MIN_STEPS or self._num_learned % _REFIT_EVERY == 0:
            self._fit()

    def knows(self, size: StepSize) -> bool:
        """Returns whether steps with as many rows, and others with as many prompt tokens, were in the fit."""
        largest = self._largest
        return size.num_rows <= largest.num_rows and size.num_prompt_tokens <= largest.num_prompt_tokens

    def expected_ns(self, size: StepSize) -> int | None:
        """Returns the nanoseconds of a step of that size; None before there is experience."""
        if self._coefficients is None:
            return None
        constant, per_row, per_prompt_token, per_token = self._coefficients
        rows, prompt_tokens, tokens = size
        return round(constant + per_row * rows + per_prompt_token * prompt_tokens + per_token * tokens)

    def row_ns(self, step_ns: float, num_rows: int) -> float:
        """Returns what one more decode row adds to a step of a number of them that takes `step_ns`."""
        return self._slope_ns(0, step_ns, num_rows)

    def prompt_token_ns(self, step_ns: float, num_rows: int) -> float:
        """Returns what a prompt token adds to a step of decode rows without prompts that takes `step_ns`."""
        return self._slope_ns(1, step_ns, num_rows)

    def _slope_ns(self, feature: int, step_ns: float, num_rows: int) -> float:
        """A slope of the fit. What is assumed before steps have differed in it counts as much as a variance of 1."""
        assumed = step_ns / (_ROWS_WORTH_A_STEP + num_rows)
        if self._coefficients is None:
            return assumed
        variance = self._variances[feature]
        return (variance * self._coefficients[1 + feature] + assumed) / (variance + 1)

    def _fit(self) -> None:
        if self._num_learned < _MIN_STEPS:
            return
        steps = self._steps[: self._num_learned]
        features = steps[:, :-1]
        self._largest = StepSize(*features[:, 1:].max(axis=0).astype(int).tolist())
        self._variances = features[:, 1:].var(axis=0).tolist()
        self._coefficients = fit_costs(features, steps[:, -1], _OUTLIER, _CLOSE).coefficients.tolist()


def size_of(record: StepRecord) -> StepSize:
    """Returns the size of a step; where a graph decodes alone, the rows are those of the graph."""
    rows = record.num_decode_seqs + record.num_draft_tokens
    if record.kind == "decode":
        rows = max(rows, record.graph_rows)
    return StepSize(rows, record.num_prefill_tokens, record.num_context_tokens)
