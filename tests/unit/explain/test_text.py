"""What a report says of itself before its figures."""

from pathlib import Path

import pytest

from roseinfer.cli import main
from roseinfer.explain import text
from roseinfer.explain.explanation import explain
from roseinfer.records import Cause
from tests.unit.explain.gaps import make_gap
from tests.unit.explain.test_command import explained, interfered


@pytest.mark.parametrize(
    ("num_newcomers", "words"),
    [(2, "Only 8 gaps are slow, fewer than 9: what follows is in part about gaps that are not."), (3, "")],
)
def test_few_slow_gaps_are_told(
    num_newcomers: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each newcomer makes four. They are told before the causes are."""
    file = tmp_path / "few.npz"
    interfered(num_newcomers).save(file)
    assert main(["explain", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    [before] = [lines[index - 1] for index, line in enumerate(lines) if line.startswith("p99 - p50 = ")]
    assert before == words
    assert explained(capsys, str(file))["has_few_slow_gaps"] is bool(words)


def test_without_a_slow_gap_that_is_told() -> None:
    gaps = [make_gap({Cause.DECODE: 9.0 + (number > 90)}) for number in range(100)]
    told = list(text.lines(explain(gaps, interfered(0), "here", "engine")))
    assert "No gap is slow: what follows is about gaps that are not." in told
