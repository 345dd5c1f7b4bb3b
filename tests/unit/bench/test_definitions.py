"""The metrics' definitions, over every timeline that an engine could produce."""

import statistics
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.bench import definitions as d
from roseinfer.bench.definitions import RequestTimes
from roseinfer.bench.seeds.report import streaming_pools
from roseinfer.bench.seeds.runs import Run
from roseinfer.records import RequestTimeline

GAP = st.integers(0, 10**10)


def times(*, target: int | None = None, start: int = 10, end: int = 13, **changed: Any) -> RequestTimes:
    """A request whose every interval is another number; see `test_worked_numbers`."""
    stamps: dict[str, Any] = {
        "request_id": "a", "recv_ns": 11, "tokenized_ns": 17, "inbox_ns": 22, "scheduled_ns": 30,
        "token_ns": [50, 60, 75], "write_ns": [51, 77], "end_ns": 80,
    }  # fmt: skip
    return RequestTimes(RequestTimeline(**(stamps | changed)), start, end, target)


@st.composite
def request_times(draw: st.DrawFn) -> RequestTimes:
    """Stamps in the order that the clock allows; tokenising may end inside or after the submission."""
    start = draw(st.integers(1, 10**12))
    end = start + draw(GAP)
    tokenized = draw(st.integers(start, end)) if draw(st.booleans()) else end + draw(GAP)
    inbox = tokenized + draw(GAP)
    scheduled = inbox + draw(GAP)
    tokens = list(accumulate([scheduled + draw(GAP) + 1, *draw(st.lists(GAP, max_size=20))]))
    return times(
        target=draw(st.none() | st.integers(0, 2 * 10**12)),
        start=start,
        end=end,
        recv_ns=start,
        tokenized_ns=tokenized,
        inbox_ns=inbox,
        scheduled_ns=scheduled,
        token_ns=tokens,
        write_ns=sorted(draw(st.lists(st.sampled_from(tokens), min_size=1, max_size=len(tokens)))),
        end_ns=tokens[-1] + draw(GAP),
    )


def test_worked_numbers() -> None:
    """Every definition of docs/benchmarking.md on one request, with numbers that no two of them share by chance."""
    request = times(target=3)
    assert request.seen.submit_lag_ns == 10 - 3
    assert d.add_request_latency(request) == 13 - 10
    assert d.tokenize(request) == 17 - 13
    assert d.engine_submit_lag(request) == 22 - 17
    assert d.engine_queue_wait(request) == 30 - 22
    assert d.queue_wait(request) == 30 - 17
    assert d.prefill_to_first_token(request) == 50 - 30
    assert request.seen.ttft_ns == 50 - 10
    assert request.seen.tpot_ns == (75 - 50) / 2
    assert d.tpot_to_end(request) == (80 - 50) / 2
    assert request.seen.inter_token_latencies_ns() == [60 - 50, 75 - 60]
    assert d.flush_gaps(request) == [77 - 51]
    assert request.seen.latency_ns == 80 - 10
    other = times(start=5, end=6, recv_ns=5, token_ns=[70], end_ns=95)
    assert d.split_elapsed([request, other]) == (70 - 5, 95 - 70)
    assert d.num_decode_tokens([request, other]) == 1
    assert d.throughput([request, other]) == pytest.approx(4 / ((95 - 5) / 1e9))


def test_only_the_two_differences_that_may_be_negative_are_cut_at_zero() -> None:
    early = times(target=12, tokenized_ns=12)
    assert early.seen.submit_lag_ns == 0, "it went out before it was due"
    assert d.tokenize(early) == 0, "the submission itself tokenised"


@pytest.mark.parametrize(
    "changed",
    [
        {"end": 9}, {"tokenized_ns": 9}, {"inbox_ns": 16}, {"scheduled_ns": 21}, {"token_ns": [29, 60]},
        {"token_ns": [50, 75, 60]}, {"end_ns": 74}, {"inbox_ns": 0}, {"scheduled_ns": 0}, {"token_ns": []},
    ],
    ids=str,
)  # fmt: skip
def test_a_stamp_before_its_predecessor_is_an_error_and_not_a_zero(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not in order|no token"):
        times(**changed)


@given(request_times())
def test_the_parts_of_ttft_add_up(times: RequestTimes) -> None:
    parts = d.queue_wait(times) + d.prefill_to_first_token(times)
    tokenized = times.timeline.tokenized_ns
    assert tokenized - times.submit_start + parts == times.seen.ttft_ns
    if tokenized >= times.submit_end:
        assert d.add_request_latency(times) + d.tokenize(times) + parts == times.seen.ttft_ns
    else:
        assert d.tokenize(times) == 0
    assert d.engine_submit_lag(times) + d.engine_queue_wait(times) == d.queue_wait(times)


@given(request_times())
def test_nothing_is_negative_and_ttft_is_within_latency(times: RequestTimes) -> None:
    for metric in (d.add_request_latency, d.tokenize, d.queue_wait, d.prefill_to_first_token):
        assert metric(times) >= 0
    assert min(times.seen.submit_lag_ns, times.seen.ttft_ns, times.seen.latency_ns) >= 0
    assert min(times.seen.inter_token_latencies_ns(), default=0) >= 0
    assert times.seen.ttft_ns <= times.seen.latency_ns


@given(request_times())
def test_tpot_is_the_mean_of_a_requests_itl(times: RequestTimes) -> None:
    gaps = times.seen.inter_token_latencies_ns()
    assert len(gaps) == len(times.timeline.token_ns) - 1
    assert times.seen.tpot_ns == (pytest.approx(statistics.mean(gaps)) if gaps else None)
    assert d.tpot_to_end(times) >= (times.seen.tpot_ns or 0)


@given(request_times())
def test_submit_lag_exists_under_an_absolute_schedule_only(times: RequestTimes) -> None:
    lags = [pool.values for pool in streaming_pools(Run(requests=[times], submit_wall=0)) if pool.name == "Submit lag"]
    assert lags == ([] if times.target is None else [[max(0, times.submit_start - times.target)]])


@given(st.lists(request_times(), min_size=1, max_size=8))
def test_throughput_times_wall_is_all_tokens(requests: list[RequestTimes]) -> None:
    wall = max(times.timeline.end_ns for times in requests) - min(times.submit_start for times in requests)
    assert d.throughput(requests) * wall / 1e9 == pytest.approx(sum(len(times.timeline.token_ns) for times in requests))


@given(st.lists(request_times(), min_size=1, max_size=8))
def test_prefill_and_decode_elapsed_share_the_wall(requests: list[RequestTimes]) -> None:
    prefill, decode = d.split_elapsed(requests)
    assert prefill >= 0
    assert decode >= 0
    wall = max(times.timeline.end_ns for times in requests) - min(times.submit_start for times in requests)
    assert prefill + decode == wall
    assert 0 <= d.num_decode_tokens(requests) <= sum(len(times.timeline.token_ns) - 1 for times in requests)
    assert decode > 0 or d.num_decode_tokens(requests) == 0


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.sampled_from([0, 50, 95, 99, 100]))
def test_percentiles_are_linear_interpolation(values: Sequence[float], percent: float) -> None:
    assert d.percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-5)


def test_percentiles_of_a_known_list() -> None:
    shown = [d.percentile([4.0, 1.0, 3.0, 2.0], percent) for percent in (0, 50, 75, 95, 100)]
    assert shown == pytest.approx([1.0, 2.5, 3.25, 3.85, 4.0])


def test_a_flush_interval_moves_flush_gaps_and_not_itl() -> None:
    tokens = range(100, 1700, 100)
    fine, coarse = (times(token_ns=[*tokens], write_ns=[*tokens[::every]], end_ns=1700) for every in (1, 8))
    assert fine.seen.inter_token_latencies_ns() == coarse.seen.inter_token_latencies_ns() == [100] * 15
    assert d.flush_gaps(fine) == [100] * 15
    assert d.flush_gaps(coarse) == [800]
