"""Cores that are taken from a real server's engine are the cause of its slow gaps, by their right name."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.stress.host_waits import NAMED, Group, measure
from roseinfer.observe.gaps.causes import Cause
from tests.conftest import requires_all

pytestmark = pytest.mark.e2e


def can_limit() -> bool:
    try:
        Group().close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("trouble", "cause"),
    [
        ("hog", Cause.CPU_WAIT),
        pytest.param(
            "0.3",
            Cause.CPU_THROTTLED,
            marks=pytest.mark.skipif(not (can_limit() or requires_all()), reason="no control group can be made"),
        ),
    ],
)
def test_slow_gaps_of_an_engine_without_a_core_say_so(trouble: str, cause: Cause, tmp_path: Path) -> None:
    gaps = measure(tmp_path / "log", "engine", trouble, num_streams=8)
    causes = Counter(gap.cause for gap in gaps)
    assert causes[cause], causes  # not most of them: others may have the cores at the same time
    affected = Counter(gap.cause for gap in gaps if gap.is_affected)
    assert sum(affected[each] for each in NAMED) >= 0.9 * affected.total(), affected
    assert sum(gap.is_baseless for gap in gaps) <= 0.1 * len(gaps), causes  # it may have waited in another thread
