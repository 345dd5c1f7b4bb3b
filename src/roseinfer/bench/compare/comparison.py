"""Judges repeated runs of two sides: effects, their intervals, and verdicts.

The unit is the run: requests of one run share its process, its memory layout and its minute of the machine, so they are
not independent, and only runs may be counted as repeats (Georges, Buytaert, Eeckhout, 2007; Kalibera, Jones, 2013). A
run gives one figure for each metric, such as its TTFT p99. An effect is the ratio of B to A in the geometric mean.

Intervals are from the wild bootstrap: the runs' deviations from their side's mean get random signs (Wu, 1986; Liu,
1988; Rademacher weights after Davidson and Flachaire, 2008), all metrics of a run the same, and the largest studentised
deviation over all metrics is taken (Westfall and Young, 1993). So the confidence is that of all intervals together, and
a dozen metrics give no more false alarms than one. Where runs are few, every combination of signs is gone through.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

MIN_RUNS = 6  # of a side; with fewer, an interval is wider than any effect that one would overlook
_MAX_ENUMERATED = 11
_NUM_DRAWS = 2048
_NUM_ORDERS = 499
_DRIFT_P = 0.02  # of whole comparisons, of steady runs: as seldom as a false alarm of the intervals
_TINY = 1e-12  # of a standard error: figures that do not vary at all


class Outcome(StrEnum):
    """What is said of a metric. Void: the machine changed so much meanwhile that nothing can be said."""

    NOISE = "noise"
    BETTER = "better"
    WORSE = "worse"
    VOID = "void"


class Metric(NamedTuple):
    """What one column of figures is."""

    name: str
    unit: str
    is_higher_better: bool = False


class Thresholds(NamedTuple):
    """When a difference counts.

    The confidence is above the usual 95 %, since with few runs the bootstrap is a little too sure of itself: at 97 %
    fewer than 5 % of comparisons of equal sides find a difference, which a test holds.
    """

    confidence: float = 0.97
    min_effect: float = 0.01  # a smaller effect is called noise, however sure it is
    max_drift: float = 0.05  # a larger change over the session makes a metric void


class Runs(NamedTuple):
    """The runs of one side.

    figures: [runs, metrics], above zero. times: [runs], when each began, on one clock for both sides.
    """

    figures: FloatArray
    times: FloatArray


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one metric. Effects are B / A - 1: 0.05 is five percent more."""

    metric: str
    unit: str
    a: float  # geometric mean of the runs
    b: float
    effect: float
    low: float  # the interval of the effect
    high: float
    drift: float  # the fitted change over the session, both sides alike: 0.05 is five percent between extremes
    drift_p: float  # how often any metric would drift as much if the runs had been in a random order
    outcome: Outcome


def judge(metrics: Sequence[Metric], a: Runs, b: Runs, *, is_paired: bool, thresholds: Thresholds) -> list[Finding]:
    """A finding for each metric. When paired, run i of both sides were neighbours in time and what they shared cancels.

    Raises ValueError for fewer than MIN_RUNS runs, or a figure that is not above zero.
    """
    if min(len(a.figures), len(b.figures)) < MIN_RUNS:
        raise ValueError(f"at least {MIN_RUNS} runs of each side are needed")
    if not (np.all(a.figures > 0) and np.all(b.figures > 0)):
        raise ValueError("figures must be above zero")
    source = np.random.default_rng(0)
    log_a, log_b = np.log(a.figures), np.log(b.figures)
    difference = log_b.mean(0) - log_a.mean(0)
    error, critical = _errors(log_a, log_b, is_paired, thresholds.confidence, source)
    drift, drift_p = drift_of(_in_order(log_a - log_a.mean(0), log_b - log_b.mean(0), a, b, is_paired), source)
    findings = []
    for index, metric in enumerate(metrics):
        low, effect, high = np.expm1(difference[index] + critical * error[index] * np.array([-1.0, 0.0, 1.0]))
        is_void = drift_p[index] <= _DRIFT_P and drift[index] > thresholds.max_drift
        findings.append(
            Finding(
                metric=metric.name,
                unit=metric.unit,
                a=float(np.exp(log_a[:, index].mean())),
                b=float(np.exp(log_b[:, index].mean())),
                effect=float(effect),
                low=float(low),
                high=float(high),
                drift=float(drift[index]),
                drift_p=float(drift_p[index]),
                outcome=Outcome.VOID if is_void else _outcome(low, effect, high, metric, thresholds.min_effect),
            )
        )
    return findings


def overall(findings: Sequence[Finding]) -> Outcome:
    """One word for all: worse if anything is, else void, else better, else noise."""
    found = {finding.outcome for finding in findings}
    return next(
        (outcome for outcome in (Outcome.WORSE, Outcome.VOID, Outcome.BETTER) if outcome in found), Outcome.NOISE
    )


def _in_order(residual_a: FloatArray, residual_b: FloatArray, a: Runs, b: Runs, is_paired: bool) -> FloatArray:
    """What may be put into another order, by time, [units, metrics].

    A round is one unit: its runs had the same prompts and the same minute, so as two they would be an order by
    themselves, which no machine has made.
    """
    if is_paired:
        return (residual_a + residual_b)[np.argsort(np.minimum(a.times, b.times), kind="stable")] / 2
    return np.concatenate([residual_a, residual_b])[np.argsort(np.concatenate([a.times, b.times]), kind="stable")]


def drift_of(residuals: FloatArray, source: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """How far figures moved over the session, and how often a random order would move any metric as much.

    residuals: [units, metrics], logarithms less their side's mean, in order of time. A parabola is fitted, so a machine
    that becomes slower, or slower and faster again, is seen. Returns the fit's range as a ratio - 1, and p, [metrics].
    The share of the variance that the parabola explains is held against the largest such share over all metrics in each
    order (Westfall and Young, 1993), so a dozen metrics give no more false alarms than one.
    """
    num_units = len(residuals)
    curve = np.linalg.qr(np.vander(np.linspace(-1, 1, num_units), 3, increasing=True))[0][:, 1:]  # [units, 2]
    fitted = curve @ (curve.T @ residuals)
    variance = np.maximum((residuals**2).sum(0), _TINY)
    explained = ((curve.T @ residuals) ** 2).sum(0) / variance
    orders = source.permuted(np.tile(np.arange(num_units), (_NUM_ORDERS, 1)), axis=1)
    shuffled = ((curve.T @ residuals[orders]) ** 2).sum(1) / variance  # [orders, metrics]
    as_much = (shuffled.max(1)[:, None] >= explained * (1 - 1e-9)).sum(0)
    return np.expm1(np.ptp(fitted, axis=0)), (1 + as_much) / (1 + _NUM_ORDERS)


def _errors(
    log_a: FloatArray, log_b: FloatArray, is_paired: bool, confidence: float, source: np.random.Generator
) -> tuple[FloatArray, float]:
    """The standard error of each difference, [metrics], and how many of them an interval is wide to each side."""
    groups = [log_b - log_a] if is_paired else [log_a, log_b]
    residuals = [(group - group.mean(0)) * np.sqrt(len(group) / (len(group) - 1)) for group in groups]
    variance = sum(group.var(0, ddof=1) / len(group) for group in groups)
    error = np.maximum(np.sqrt(variance), _TINY)
    signs = _signs(sum(len(group) for group in groups), source)  # [draws, units]
    shift, spread, begin = np.zeros((len(signs), log_a.shape[1])), np.zeros((len(signs), log_a.shape[1])), 0
    for side, group in enumerate(residuals):
        size = len(group)
        mean = signs[:, begin : begin + size] @ group / size
        squares = np.maximum((group**2).mean(0) - mean**2, 0.0)  # signs leave the mean of the squares as it is
        shift += mean if side else -mean
        spread += squares / (size - 1)
        begin += size
    deviations = np.abs(shift) / np.maximum(np.sqrt(spread), _TINY)
    return error, float(np.quantile(deviations.max(1), confidence))


def _signs(num_units: int, source: np.random.Generator) -> FloatArray:
    """All combinations of +1 and -1 when they are few, else a sample of them, [draws, units]."""
    if num_units <= _MAX_ENUMERATED:
        bits = (np.arange(2**num_units)[:, None] >> np.arange(num_units)) & 1
        return 1.0 - 2.0 * bits.astype(np.float64)
    return source.choice([-1.0, 1.0], (_NUM_DRAWS, num_units))


def _outcome(low: float, effect: float, high: float, metric: Metric, min_effect: float) -> Outcome:
    if low <= 0 <= high or abs(effect) < min_effect:
        return Outcome.NOISE
    return Outcome.BETTER if (effect > 0) == metric.is_higher_better else Outcome.WORSE
