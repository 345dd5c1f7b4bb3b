"""The statistics of a comparison on figures whose truth is known: false alarms, detection, drift, what is refused."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from roseinfer.bench.compare.comparison import Finding, Metric, Outcome, Runs, Thresholds, drift_of, judge, overall
from roseinfer.bench.options import DEFAULT_ROUNDS

METRICS = [
    *(Metric(f"{name} p{percent}", "ms") for name in ("TTFT", "TPOT", "ITL", "Latency") for percent in (50, 95, 99)),
    Metric("Throughput", "tokens/s", is_higher_better=True),
]
TPOT_P50 = 3
NUM_ROUNDS = DEFAULT_ROUNDS
NUM_EXPERIMENTS = 300
NOISE = 0.02  # of a run's figure, a little more than of two equal servers on a quiet machine
FloatArray = npt.NDArray[np.float64]


def noise(source: np.random.Generator, num_rounds: int, tail: str) -> FloatArray:
    """Metrics of one run rise and fall together. With a tail, now and then a run is far off."""
    shape = (num_rounds, len(METRICS))
    own = source.standard_normal(shape) if tail == "normal" else source.standard_t(3, shape) / 3**0.5
    return np.asarray(NOISE * (0.6**0.5 * source.standard_normal((num_rounds, 1)) + 0.4**0.5 * own))


def sides(
    seed: int, *, effect: float = 0.0, metric: int | None = None, drift: FloatArray | None = None, **options: Any
) -> tuple[Runs, Runs]:
    """A B B A A B ...: figures about 10, those of B larger by the effect; `drift` is added in order of time."""
    source, num_rounds = np.random.default_rng(seed), options.get("num_rounds", NUM_ROUNDS)
    tail = options.get("tail", "normal")
    slots = np.arange(2 * num_rounds).reshape(num_rounds, 2)
    slots[1::2] = slots[1::2, ::-1]
    moved = np.zeros(2 * num_rounds) if drift is None else drift
    logs = [np.log(10.0) + noise(source, num_rounds, tail) + moved[slots[:, side], None] for side in (0, 1)]
    changed = np.zeros(len(METRICS))
    changed[slice(None) if metric is None else metric] = np.log1p(effect)
    a, b = (Runs(np.exp(log + side * changed), slots[:, side].astype(float)) for side, log in enumerate(logs))
    return a, b


def found(a: Runs, b: Runs, is_paired: bool = True, **thresholds: float) -> list[Finding]:
    return judge(METRICS, a, b, is_paired=is_paired, thresholds=Thresholds(**thresholds))


@pytest.mark.parametrize("tail", ["normal", "heavy"])
@pytest.mark.parametrize("is_paired", [True, False])
@pytest.mark.parametrize("num_rounds", [6, NUM_ROUNDS])
def test_equal_sides_are_noise_in_nineteen_of_twenty_comparisons(num_rounds: int, is_paired: bool, tail: str) -> None:
    """Of whole comparisons: one metric of thirteen that differs is an alarm. Without a smallest effect, too."""
    alarms = 0
    for seed in range(NUM_EXPERIMENTS):
        findings = found(*sides(seed, num_rounds=num_rounds, tail=tail), is_paired=is_paired, min_effect=0.0)
        alarms += any(finding.outcome in {Outcome.BETTER, Outcome.WORSE} for finding in findings)
    assert alarms / NUM_EXPERIMENTS <= 0.05


def test_a_tpot_that_is_five_percent_worse_is_found_in_nine_of_ten_comparisons() -> None:
    hits = 0
    for seed in range(NUM_EXPERIMENTS):
        findings = found(*sides(seed, effect=0.05, metric=TPOT_P50))
        hits += findings[TPOT_P50].outcome is Outcome.WORSE
    assert hits / NUM_EXPERIMENTS >= 0.9


def test_intervals_cover_the_truth_together() -> None:
    covered = 0
    for seed in range(NUM_EXPERIMENTS):
        findings = found(*sides(seed, effect=0.1))
        covered += all(finding.low <= 0.1 <= finding.high for finding in findings)
    assert covered / NUM_EXPERIMENTS >= 0.95


TIME = np.linspace(0, 1, 2 * NUM_ROUNDS)


@pytest.mark.parametrize(
    "drift",
    [0.15 * TIME, -0.15 * TIME, 0.15 * (TIME > 0.5), 0.15 * (1 - np.abs(2 * TIME - 1))],
    ids=["slower", "faster", "a step", "there and back"],
)
def test_a_machine_that_changes_makes_it_void(drift: FloatArray) -> None:
    """Also when there is an effect; and no side is called worse for it."""
    outcomes = [
        {finding.outcome for finding in found(*sides(seed, effect=effect, drift=drift))}
        for seed in range(50)
        for effect in (0.0, 0.1)
    ]
    assert sum(Outcome.VOID in outcome for outcome in outcomes) >= 0.95 * len(outcomes)
    equal = [found(*sides(seed, drift=drift)) for seed in range(100)]
    assert sum(overall(findings) is Outcome.WORSE for findings in equal) <= 5


def test_a_drift_that_is_allowed_leaves_the_verdict() -> None:
    """In turn A B B A, so a machine that changes evenly hits both sides alike."""
    findings = found(*sides(1, effect=0.2, drift=0.15 * TIME), max_drift=0.3)
    assert {finding.outcome for finding in findings[:-1]} == {Outcome.WORSE}


def test_steady_runs_do_not_drift() -> None:
    voids = sum(finding.outcome is Outcome.VOID for seed in range(NUM_EXPERIMENTS) for finding in found(*sides(seed)))
    assert voids / (NUM_EXPERIMENTS * len(METRICS)) <= 0.01


def test_a_whole_comparison_of_steady_runs_is_seldom_void() -> None:
    """One metric of thirteen that drifts makes it void. What a round's runs share, its prompts, is no drift either."""
    voids = 0
    for seed in range(NUM_EXPERIMENTS):
        a, b = sides(seed)
        rounds = np.exp(0.1 * np.random.default_rng(1000 + seed).standard_normal((NUM_ROUNDS, 1)))
        findings = found(Runs(a.figures * rounds, a.times), Runs(b.figures * rounds, b.times))
        voids += any(finding.outcome is Outcome.VOID for finding in findings)
    assert voids / NUM_EXPERIMENTS <= 0.03


def test_the_drift_is_the_range_of_the_curve() -> None:
    drift, p = drift_of(np.stack([np.log1p(0.2) * (TIME - 0.5), np.zeros_like(TIME)], 1), np.random.default_rng(0))
    assert drift == pytest.approx([0.2, 0.0])
    assert p == pytest.approx([0.002, 1.0])


def test_effects_have_a_size_and_a_direction() -> None:
    findings = found(*sides(2, effect=-0.3))
    assert {finding.outcome for finding in findings[:-1]} == {Outcome.BETTER}
    assert findings[-1].outcome is Outcome.WORSE, "of throughput less is worse"
    for finding in findings:
        assert finding.effect == pytest.approx(finding.b / finding.a - 1)
        assert finding.low < finding.effect < finding.high < 0
    assert overall(findings) is Outcome.WORSE
    assert overall(findings[:-1]) is Outcome.BETTER


def test_what_is_sure_and_small_is_noise() -> None:
    a, b = sides(7, effect=0.02)
    exact = Runs(a.figures * 1.02, b.times)
    assert {finding.outcome for finding in found(a, exact)[:-1]} == {Outcome.WORSE}
    assert {finding.outcome for finding in found(a, exact, min_effect=0.05)} == {Outcome.NOISE}
    assert {finding.outcome for finding in found(a, a)} == {Outcome.NOISE}


def test_runs_that_were_no_neighbours_share_nothing() -> None:
    """What both had in common cancels only where it was common."""
    a, b = sides(4, effect=0.05)
    minute = np.exp(np.linspace(-0.1, 0.1, NUM_ROUNDS) * np.array([1, -1] * (NUM_ROUNDS // 2)))[:, None]
    shaken = Runs(a.figures * minute, a.times), Runs(b.figures * minute, b.times)
    paired, apart = found(*shaken)[TPOT_P50], found(*shaken, is_paired=False)[TPOT_P50]
    assert paired.effect == pytest.approx(apart.effect)
    assert apart.high - apart.low > 1.5 * (paired.high - paired.low)


def test_sides_of_different_sizes() -> None:
    a, b = sides(5, effect=0.3, num_rounds=10)
    findings = found(a, Runs(b.figures[:6], b.times[:6]), is_paired=False)
    assert {finding.outcome for finding in findings[:-1]} == {Outcome.WORSE}


def test_too_few_runs_and_figures_without_a_logarithm_are_refused() -> None:
    a, b = sides(6, num_rounds=5)
    with pytest.raises(ValueError, match="at least 6 runs of each side"):
        found(a, b)
    a, b = sides(6)
    a.figures[0, 0] = 0.0
    with pytest.raises(ValueError, match="above zero"):
        found(a, b)
