"""The metrics' definitions, over every timeline that an engine could produce."""

import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.bench import definitions as d
from roseinfer.bench.definitions import RequestTimes
from roseinfer.records import FinishReason, RequestTimeline

GAP = st.integers(0, 10**10)


@st.composite
def request_times(draw: st.DrawFn) -> RequestTimes:
    """Stamps in the order that the clock allows; tokenising may end inside or after the submission."""
    start = draw(st.integers(1, 10**12))
    end = start + draw(GAP)
    tokenize_done = draw(st.integers(start, end)) if draw(st.booleans()) else end + draw(GAP)
    inbox = tokenize_done + draw(GAP)
    admit = inbox + draw(GAP)
    tokens = list(np.cumsum([admit + draw(GAP) + 1, *draw(st.lists(GAP, max_size=20))]).tolist())
    writes = sorted(draw(st.lists(st.sampled_from(tokens), min_size=1, max_size=len(tokens))))
    return RequestTimes(
        target=draw(st.none() | st.integers(0, 2 * 10**12)),
        submit_start=start,
        submit_end=end,
        tokenize_done=tokenize_done,
        inbox=inbox,
        admit=admit,
        tokens=tokens,
        writes=writes,
        finish=tokens[-1] + draw(GAP),
    )


@given(request_times())
def test_the_parts_of_ttft_add_up(times: RequestTimes) -> None:
    parts = d.queue_wait(times) + d.prefill_to_first_token(times)
    assert times.tokenize_done - times.submit_start + parts == d.ttft(times)
    if times.tokenize_done >= times.submit_end:
        assert d.add_request_latency(times) + d.tokenize(times) + parts == d.ttft(times)
    else:
        assert d.tokenize(times) == 0
    assert d.engine_submit_lag(times) + d.engine_queue_wait(times) == d.queue_wait(times)


@given(request_times())
def test_nothing_is_negative_and_ttft_is_within_latency(times: RequestTimes) -> None:
    for metric in (d.add_request_latency, d.tokenize, d.queue_wait, d.prefill_to_first_token, d.ttft, d.latency):
        assert metric(times) >= 0
    assert (d.submit_lag(times) or 0) >= 0
    assert min(d.inter_token_latencies(times), default=0) >= 0
    assert d.ttft(times) <= d.latency(times)
    assert all(times.tokens[0] <= token <= times.finish for token in times.tokens)


@given(request_times())
def test_tpot_is_the_mean_of_a_requests_itl(times: RequestTimes) -> None:
    gaps = d.inter_token_latencies(times)
    assert len(gaps) == len(times.tokens) - 1
    assert d.tpot(times) == (pytest.approx(statistics.mean(gaps)) if gaps else None)
    assert d.tpot_to_finish(times) >= (d.tpot(times) or 0)


@given(request_times())
def test_submit_lag_exists_under_an_absolute_schedule_only(times: RequestTimes) -> None:
    assert (d.submit_lag(times) is None) == (times.target is None)
    if times.target is not None:
        assert d.submit_lag(times) == max(0, times.submit_start - times.target)


@given(st.lists(request_times(), min_size=1, max_size=8))
def test_throughput_times_wall_is_all_tokens(requests: list[RequestTimes]) -> None:
    wall = max(times.finish for times in requests) - min(times.submit_start for times in requests)
    assert d.throughput(requests) * wall / 1e9 == pytest.approx(sum(len(times.tokens) for times in requests))


@given(st.lists(request_times(), min_size=1, max_size=8))
def test_prefill_and_decode_elapsed_share_the_wall(requests: list[RequestTimes]) -> None:
    prefill, decode = d.split_elapsed(requests)
    assert prefill >= 0
    assert decode >= 0
    wall = max(times.finish for times in requests) - min(times.submit_start for times in requests)
    assert prefill + decode == wall
    assert 0 <= d.num_decode_tokens(requests) <= sum(len(times.tokens) - 1 for times in requests)
    assert decode > 0 or d.num_decode_tokens(requests) == 0


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.sampled_from([0, 50, 95, 99, 100]))
def test_percentiles_are_linear_interpolation(values: Sequence[float], percent: float) -> None:
    assert d.percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-5)


def test_percentiles_of_a_known_list() -> None:
    assert [d.percentile([4.0, 1.0, 3.0, 2.0], p) for p in (0, 50, 75, 95, 100)] == [1.0, 2.5, 3.25, 3.85, 4.0]


def test_a_flush_interval_moves_flush_gaps_and_not_itl() -> None:
    tokens = range(0, 1600, 100)
    fine, coarse = (
        RequestTimes(
            target=None, submit_start=-9, submit_end=-9, tokenize_done=-9, inbox=-5, admit=-1,
            tokens=tokens, writes=tokens[::interval], finish=1500,
        )
        for interval in (1, 8)
    )  # fmt: skip
    assert d.inter_token_latencies(fine) == d.inter_token_latencies(coarse) == [100] * 15
    assert d.flush_gaps(fine) == [100] * 15
    assert d.flush_gaps(coarse) == [800]


def test_a_timeline_gives_its_stamps() -> None:
    timeline = RequestTimeline(
        request_id="a", recv_ns=10, tokenized_ns=12, inbox_ns=13, scheduled_ns=14, token_ns=[15, 16], write_ns=[17],
        end_ns=18, num_prompt_tokens=3, num_cached_tokens=2, num_preemptions=1, finish_reason=FinishReason.LENGTH,
    )  # fmt: skip
    times = RequestTimes.of(timeline, 9, 11, 8)
    assert times == RequestTimes(
        target=8, submit_start=9, submit_end=11, tokenize_done=12, inbox=13, admit=14, tokens=(15, 16), writes=(17,),
        finish=18, num_prompt_tokens=3, num_cached_tokens=2, num_preemptions=1,
    )  # fmt: skip
    timeline.token_ns.append(99)
    assert times.tokens == (15, 16), "later tokens of the timeline do not reach into a report"
