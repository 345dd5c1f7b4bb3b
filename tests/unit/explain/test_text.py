"""What a report says of itself before its figures."""

import dataclasses

import msgspec
import pytest

from roseinfer.explain import text
from roseinfer.explain.explanation import explain
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import Gap
from tests.unit.explain.gaps import make_gap
from tests.unit.explain.test_command import interfered
from tests.unit.observe.facts import ENGINE


def gaps_of(num_gaps: int, num_slow: int) -> list[Gap]:
    """Of so many gaps so many waited for a prompt; of the others no two are equally long."""
    ordinary = [make_gap({Cause.DECODE: 9.0 + number / num_gaps}) for number in range(num_gaps - num_slow)]
    return ordinary + [make_gap({Cause.DECODE: 9.0, Cause.PREFILL_OF_OTHERS: 30.0})] * num_slow


IN_PART, NOT = "what follows is in part about gaps that are not.", "what follows is about gaps that are not."


@pytest.mark.parametrize(
    ("num_gaps", "num_slow", "words"),
    [
        (100, 1, f"Of the 9 gaps around p99 only 1 is slow: {IN_PART}"),
        (100, 8, f"Of the 9 gaps around p99 only 8 are slow: {IN_PART}"),
        (100, 9, ""),
        (2000, 12, f"Of the 21 gaps around p99 only 2 are slow: {IN_PART}"),
        (5000, 20, f"Of the 51 gaps around p99 none is slow: {NOT}"),
        (20_000, 90, f"Of the 201 gaps around p99 none is slow: {NOT}"),
        (20_000, 270, f"Of the 201 gaps around p99 only 170 are slow: {IN_PART}"),
        (20_000, 290, ""),
    ],
)
def test_few_slow_gaps_among_those_that_vote_are_named(num_gaps: int, num_slow: int, words: str) -> None:
    """Before the causes are; and of slow gaps the causes are what was planted."""
    explanation = explain(gaps_of(num_gaps, num_slow), interfered(0), "here", "engine")
    lines = list(text.lines(explanation))
    [before] = [lines[index - 1] for index, line in enumerate(lines) if line.startswith("p99 - p50 = ")]
    assert before == words
    assert explanation.has_few_slow_gaps is bool(words)
    shares = {share.cause: share.share for share in explanation.causes}
    of_slow = explanation.num_slow_votes / explanation.num_votes
    assert shares.get(Cause.PREFILL_OF_OTHERS, 0.0) == pytest.approx(of_slow)


def test_without_a_slow_gap_it_says_so() -> None:
    gaps = [make_gap({Cause.DECODE: 9.0 + (number > 90)}) for number in range(100)]
    told = list(text.lines(explain(gaps, interfered(0), "here", "engine")))
    assert "No gap is slow: what follows is about gaps that are not." in told


@pytest.mark.parametrize(
    ("limit", "num_throttled", "first"),
    [
        (0.6, 3, "A CPU limit of 0.6 cores stopped the server: 3 of 5 slow gaps are its doing."),
        (None, 1, "A CPU limit stopped the server: 1 of 5 slow gaps are its doing."),
        (1.0, 0, "The server has a CPU limit of 1 core; it is the cause of none of 5 slow gaps."),
        (None, 0, "100 gaps between tokens in the engine"),
    ],
)
def test_a_cpu_limit_is_the_first_thing_that_is_said(limit: float | None, num_throttled: int, first: str) -> None:
    recording = interfered(0)
    meta = msgspec.structs.replace(recording.meta, engine=msgspec.structs.replace(ENGINE, cpu_limit=limit))
    recording = dataclasses.replace(recording, meta=meta)
    throttled = [make_gap({Cause.DECODE: 9.0, Cause.CPU_THROTTLED: 30.0})] * num_throttled
    gaps = [*gaps_of(100 - num_throttled, 5 - num_throttled), *throttled]
    explanation = explain(gaps, recording, "here", "engine")
    line = next(iter(text.lines(explanation)))
    assert line.startswith(first)
    assert (explanation.cpu_limit, explanation.num_throttled) == (limit, num_throttled)
