"""Stamps of streams into figures: the definitions of the docstring, on streams that can be worked out by hand."""

from collections.abc import Sequence

import pytest

from benchmarks.figures import Spread, medians, steady_gaps_ns, summarise
from roseinfer.bench.definitions import Observed
from roseinfer.bench.load.event_stream import count_tokens


def stream_of(submitted: float, pieces: Sequence[float], num_tokens: int) -> Observed:
    """One answered request, of stamps in seconds: when it was sent, and when each piece of the answer arrived."""
    sent_ns, counts = round(submitted * 1e9), count_tokens(num_tokens, len(pieces), None)
    token_ns = [round(piece * 1e9) for piece in pieces[: len(counts)]]
    return Observed(request_id="", intended_ns=sent_ns, sent_ns=sent_ns, token_ns=token_ns, token_counts=counts)


def steady(submitted: float, first: float, gap: float, num_tokens: int) -> Observed:
    """One piece a token, evenly spaced."""
    return stream_of(submitted, [first + i * gap for i in range(num_tokens)], num_tokens)


def test_one_stream() -> None:
    row = summarise([stream_of(10.0, [10.5, 10.6, 10.8], 3)])
    assert row["tokens"] == 3
    assert row["tokens_per_s"] == pytest.approx(3 / 0.8)
    assert row["ttft_p50_ms"] == pytest.approx(500)
    assert row["tpot_p50_ms"] == pytest.approx(150)
    assert row["itl_p50_ms"] == pytest.approx(150)
    assert row["itl_p99_ms"] == pytest.approx(199)


def test_a_piece_of_several_tokens_makes_a_gap_for_each_of_them() -> None:
    row = summarise([stream_of(0.0, [1.0, 2.0], 9)])
    assert row["tpot_p50_ms"] == pytest.approx(125)
    assert row["itl_p50_ms"] == pytest.approx(125)
    assert row["tokens_per_s"] == pytest.approx(4.5)


def test_the_rate_is_from_the_first_submission_to_the_last_token_of_all() -> None:
    row = summarise([steady(0.0, 1.0, 1.0, 2), steady(3.0, 4.0, 1.0, 2)])
    assert row["tokens_per_s"] == pytest.approx(4 / 5)
    assert row["ttft_p50_ms"] == pytest.approx(1000)


def test_prompts_are_read_when_every_stream_has_its_first_token() -> None:
    row = summarise([steady(0.0, 1.0, 1.0, 9), steady(0.0, 2.0, 1.0, 9)], 600)
    assert row["prompt_tokens_per_s"] == pytest.approx(300)


def test_figures_that_no_stream_has_are_left_out() -> None:
    row = summarise([stream_of(0.0, [1.0], 1)])
    assert not {name for name in row if name.startswith(("tpot", "itl", "steady"))}


def test_steady_state_leaves_the_ramp_out() -> None:
    """Ten streams that begin a second apart: all run from 9 s to 20 s, when the first one ends."""
    streams = [steady(float(i), float(i), 0.5, 41) for i in range(10)]
    slow_start = stream_of(0.0, [0.0, 5.0, *(10.0 + 0.5 * i for i in range(21))], 23)
    gaps = steady_gaps_ns([slow_start, *streams[1:]])
    assert gaps
    assert max(gaps) == pytest.approx(0.5e9), "the gap of five seconds lies in the ramp"


def test_steady_state_of_streams_that_never_overlap_is_each_of_them() -> None:
    streams = [steady(0.0, 0.0, 1.0, 3), steady(5.0, 5.0, 1.0, 3)]
    assert steady_gaps_ns(streams) == pytest.approx([1e9] * 4)


def test_median_and_range() -> None:
    assert Spread.of([3.0, 1.0, 8.0]) == Spread(3.0, 1.0, 8.0, 3)
    assert medians([{"a": 1.0}, {"a": 3.0, "b": 5.0}]) == {"a": 2.0, "b": 5.0}
