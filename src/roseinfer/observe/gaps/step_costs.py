"""Steps in, what computing a decode step of some size usually takes; knows nothing of requests or causes.

The model is `a + b * rows + c * context tokens`, fitted by least squares to recent steps that did nothing but decode.
"""

import numpy as np
import numpy.typing as npt

from roseinfer.observe.metrics.quantiles import median
from roseinfer.records import StepRecord

_WINDOW = 256  # steps that are remembered
_REFIT_EVERY = 64  # learned steps; a fit takes as long as half a millisecond
_MIN_STEPS = 4
_OUTLIER = 3.0  # times the median residual, beyond which a step has no part in the fit
_CLOSE = 0.5  # of what is expected: a step as near as that always has its part
_RIDGE = 1e-3  # on normalised features: rows and contexts that never change must not make the fit singular


class StepCosts:
    """What recent decode steps say of the next one."""

    def __init__(self) -> None:
        self._features: npt.NDArray[np.float64] = np.ones((_WINDOW, 3))
        self._compute_ns: npt.NDArray[np.float64] = np.zeros(_WINDOW)
        self._num_learned = 0
        self._coefficients: tuple[float, float, float] | None = None
        self._max_rows = 0  # of the steps in the fit

    def learn(self, record: StepRecord, compute_ns: int) -> None:
        """Take a step in that did nothing but decode."""
        at = self._num_learned % _WINDOW
        self._features[at, 1], self._features[at, 2] = rows_of(record), record.num_context_tokens
        self._compute_ns[at] = compute_ns
        self._num_learned += 1
        is_new = rows_of(record) > self._max_rows
        if is_new or self._num_learned < 2 * _MIN_STEPS or self._num_learned % _REFIT_EVERY == 0:
            self._fit()

    def knows(self, num_rows: int) -> bool:
        """Steps of so many rows lie within experience."""
        return num_rows <= self._max_rows

    def expected_ns(self, num_rows: int, num_context_tokens: int) -> int | None:
        """Nanoseconds of a decode step of that size; None before there is experience."""
        if self._coefficients is None:
            return None
        constant, per_row, per_token = self._coefficients
        return max(0, round(constant + per_row * num_rows + per_token * num_context_tokens))

    def _fit(self) -> None:
        count = min(self._num_learned, _WINDOW)
        if count < _MIN_STEPS:
            return
        features, times = self._features[:count], self._compute_ns[:count]
        coefficients = _least_squares(features, times)
        expected = features @ coefficients
        residuals = np.abs(expected - times)
        is_usual = residuals <= np.maximum(_OUTLIER * median(residuals), _CLOSE * expected)
        if not is_usual.all():
            coefficients = _least_squares(features[is_usual], times[is_usual])
        constant, per_row, per_token = coefficients.tolist()
        self._max_rows = int(features[:, 1].max())
        self._coefficients = constant, per_row, per_token


def _least_squares(features: npt.NDArray[np.float64], times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Coefficients of the features, none of them negative but the constant; a slope below 0 is set to 0."""
    means, scales = features.mean(axis=0), features.std(axis=0)
    is_used = scales > 0
    while True:
        coefficients = np.zeros(features.shape[1])
        if is_used.any():
            normalised = (features[:, is_used] - means[is_used]) / scales[is_used]
            gram = normalised.T @ normalised + _RIDGE * len(times) * np.eye(is_used.sum())
            slopes = np.linalg.solve(gram, normalised.T @ (times - times.mean())) / scales[is_used]
            coefficients[is_used] = slopes
        if (coefficients >= 0).all():
            coefficients[0] = times.mean() - coefficients @ means
            return coefficients
        is_used &= coefficients > 0


def rows_of(record: StepRecord) -> int:
    """Decode rows that the device computes: those of the graph, padding included, when one ran."""
    return max(record.num_decode_seqs, record.graph_rows)
