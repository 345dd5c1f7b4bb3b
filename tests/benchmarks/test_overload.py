"""What the runs of an overload are printed as."""

import pytest

from benchmarks.overload import AT_CAPACITY, CAPACITY_RUNS, tell
from benchmarks.overload_client import PARTS, Seen


def seen(num_answered: int) -> Seen:
    """Of half a second."""
    made = Seen(num_tokens=64 * num_answered, duration_s=0.5)
    made.first_token_s, made.whole_s = [0.1] * num_answered, [0.2] * num_answered
    made.parts_s = [dict.fromkeys(("late", *PARTS, "way"), 0.01)] * num_answered
    return made


def test_the_capacity_of_each_round_is_told_before_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """It is what was answered of twice the closed loop's rate."""
    names = (*CAPACITY_RUNS, AT_CAPACITY, "4 times")
    tell([{name: seen(num_answered) for name in names} | {CAPACITY_RUNS[0]: seen(9)} for num_answered in (42, 45)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["capacity 84, 90 requests a second", ""]
    assert lines[2].startswith("| run |")
