"""The same as numpy's, without its first call's import."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.observe.metrics.quantiles import median, quantiles

NUMBERS = st.lists(st.integers(0, 10**12), min_size=1, max_size=50)


@given(NUMBERS)
def test_medians_are_numpys(numbers: list[int]) -> None:
    assert median(np.array(numbers)) == pytest.approx(np.median(numbers), rel=1e-12)


@given(NUMBERS, st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_quantiles_are_numpys(numbers: list[int], shares: list[float]) -> None:
    assert quantiles(np.array(numbers), shares) == pytest.approx(np.quantile(numbers, shares).tolist(), rel=1e-9, abs=1)


def test_they_import_nothing() -> None:
    script = (
        "import sys; import numpy as np; from roseinfer.observe.metrics.quantiles import median, quantiles; "
        "before = set(sys.modules); median(np.ones(3)); quantiles(np.ones(3), (0.1, 0.9)); "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
