"""The definitions of design and docs, as arithmetic on stamps."""

from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.observe.gaps import intervals
from roseinfer.records import RequestTimeline
from tests.unit.observe.facts import MS, make_timeline

PARTS = (
    intervals.receive_ns,
    intervals.tokenize_ns,
    intervals.submit_lag_ns,
    intervals.queue_wait_ns,
    intervals.prefill_ns,
    intervals.first_write_ns,
)


def test_each_part_is_its_own_pair_of_stamps() -> None:
    assert [part(make_timeline()) for part in PARTS] == [1 * MS, 2 * MS, 4 * MS, 8 * MS, 16 * MS, 32 * MS]


def test_whole_intervals() -> None:
    timeline = make_timeline()
    assert intervals.time_to_first_token_ns(timeline) == 63 * MS
    assert intervals.engine_time_to_first_token_ns(timeline) == 28 * MS
    assert intervals.time_per_output_token_ns(timeline) == 64 * MS
    assert intervals.stream_gaps_ns(timeline) == [62 * MS, 65 * MS]
    assert intervals.request_duration_ns(timeline) == 191 * MS


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(min_value=1, max_value=2**62), min_size=7, max_size=7).map(sorted))
def test_the_parts_add_up_to_the_time_to_first_token(stamps: list[int]) -> None:
    recv, parsed, tokenized, inbox, scheduled, token, write = stamps
    timeline = RequestTimeline(
        request_id="r",
        recv_ns=recv,
        parsed_ns=parsed,
        tokenized_ns=tokenized,
        inbox_ns=inbox,
        scheduled_ns=scheduled,
        token_ns=[token],
        write_ns=[write],
    )
    lengths = [part(timeline) for part in PARTS]
    assert sum(length for length in lengths if length is not None) == intervals.time_to_first_token_ns(timeline)
    assert None not in lengths


def test_a_point_that_was_not_reached_gives_no_interval() -> None:
    queued = make_timeline(scheduled_ns=0, token_ns=[], write_ns=[])
    assert intervals.submit_lag_ns(queued) == 4 * MS
    assert intervals.queue_wait_ns(queued) is None
    assert intervals.prefill_ns(queued) is None
    assert intervals.first_write_ns(queued) is None
    assert intervals.time_to_first_token_ns(queued) is None
    assert intervals.engine_time_to_first_token_ns(queued) is None
    assert intervals.time_per_output_token_ns(queued) is None
    assert intervals.stream_gaps_ns(queued) == []


def test_one_token_has_no_time_per_output_token() -> None:
    assert intervals.time_per_output_token_ns(make_timeline(token_ns=[5])) is None
