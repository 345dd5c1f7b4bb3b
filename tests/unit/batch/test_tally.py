"""The rates of a batch, and how long it says the rest will take."""

import time

from roseinfer.batch.command import Tally


def test_a_rest_is_estimated_once_as_many_are_answered_as_run_at_a_time() -> None:
    """Four lines run at a time, each for ten seconds: the first of them is no tenth of a line a second."""
    tally = Tally(num_before=60, began_ns=time.monotonic_ns() - 10_000_000_000, num_at_once=4)
    tally.num_answers = 1
    assert "left" not in tally.rates(100)
    tally.num_answers = 4
    assert tally.rates(100) == "0.4 lines/s, 0 tokens/s, about 90.0 s left"
