"""The fit of step costs finds planted costs again, leaves outliers out, and has no negative coefficient."""

import numpy as np
import pytest

from roseinfer.runtime.step_costs import FloatArray, StepCosts, StepSize, fit_costs, size_of
from tests.unit.observe.facts import make_step

NUM_STEPS = 200


def features_of(rows: FloatArray, context: FloatArray) -> FloatArray:
    return np.stack([np.ones(len(rows)), rows, context], axis=1)


@pytest.fixture
def features() -> FloatArray:
    numbers = np.random.default_rng(1)
    return features_of(numbers.uniform(1, 64, NUM_STEPS), numbers.uniform(100, 20_000, NUM_STEPS))


def test_planted_costs_are_found_again_whatever_the_outliers(features: FloatArray) -> None:
    times = features @ [1e6, 2e4, 50.0]
    times[::10] += 1e8
    fit = fit_costs(features, times, outlier=5.0)
    assert fit.coefficients.tolist() == pytest.approx([1e6, 2e4, 50.0], rel=1e-4)
    assert int(fit.is_used.sum()) == NUM_STEPS - NUM_STEPS // 10


@pytest.mark.parametrize("planted", [[1e6, -5e3, 50.0], [-5e5, 2e4, 50.0], [1e6, -5e3, -1.0]])
def test_no_coefficient_is_negative(features: FloatArray, planted: list[float]) -> None:
    assert fit_costs(features, features @ planted, outlier=5.0).coefficients.min() >= 0


def test_what_never_changes_or_changes_together_is_no_trouble() -> None:
    rows = np.arange(1.0, 41.0)
    together = features_of(rows, rows * 500)
    assert together @ fit_costs(together, 1e6 + 2e4 * rows, 3.0).coefficients == pytest.approx(1e6 + 2e4 * rows)
    same = features_of(np.full(40, 4.0), np.full(40, 90.0))
    assert fit_costs(same, np.full(40, 3e6), 3.0).coefficients.tolist() == [3e6, 0, 0]


def test_experience_comes_with_steps_and_ends_at_its_rows() -> None:
    costs = StepCosts()
    assert costs.expected_ns(StepSize(4, 0, 400)) is None
    for rows in (1, 2, 3, 4, 3, 2):
        step = make_step(num_decode_seqs=rows, num_context_tokens=100 * rows)
        costs.learn(size_of(step), 1_000_000 + 50_000 * rows)
    assert costs.expected_ns(StepSize(4, 0, 400)) == pytest.approx(1_200_000, rel=1e-3)
    assert (costs.knows(StepSize(4, 0, 400)), costs.knows(StepSize(5, 0, 500))) == (True, False)
    assert not costs.knows(StepSize(4, 16, 400))


def test_a_row_and_a_prompt_token_cost_what_steps_have_shown() -> None:
    costs = StepCosts()
    assert costs.row_ns(1000.0, 10) == costs.prompt_token_ns(1000.0, 10) == 50  # assumed: nothing is known yet
    for _ in range(20):
        costs.learn(StepSize(4, 0, 0), 1_200_000)
    assert costs.prompt_token_ns(1_200_000, 4) == pytest.approx(1_200_000 / 14)  # what never changed tells nothing
    for prompt_tokens in (0, 32, 64, 128) * 10:
        for rows in (1, 8):
            costs.learn(StepSize(rows, prompt_tokens, 0), 1_000_000 + 50_000 * rows + 7_000 * prompt_tokens)
    assert costs.row_ns(1_200_000, 4) == pytest.approx(50_000, rel=0.1)
    assert costs.prompt_token_ns(1_200_000, 4) == pytest.approx(7_000, rel=0.1)
