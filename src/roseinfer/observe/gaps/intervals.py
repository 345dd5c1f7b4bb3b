"""Stamps in, intervals out: what each latency means, as code; knows nothing of metrics, logs or spans.

receive + tokenize + submit lag + queue wait + prefill + first write = time to first token, to the nanosecond. An
interval is None unless both of its ends were reached, so an aborted request has only the parts it lived through.
"""

from collections.abc import Sequence
from itertools import pairwise

from roseinfer.records import RequestTimeline


def _between(start_ns: int, end_ns: int) -> int | None:
    return end_ns - start_ns if start_ns and end_ns else None


def _first(stamps_ns: Sequence[int]) -> int:
    return stamps_ns[0] if stamps_ns else 0


def receive_ns(timeline: RequestTimeline) -> int | None:
    return _between(timeline.recv_ns, timeline.parsed_ns)


def tokenize_ns(timeline: RequestTimeline) -> int | None:
    return _between(timeline.parsed_ns, timeline.tokenized_ns)


def submit_lag_ns(timeline: RequestTimeline) -> int | None:
    return _between(timeline.tokenized_ns, timeline.inbox_ns)


def queue_wait_ns(timeline: RequestTimeline) -> int | None:
    return _between(timeline.inbox_ns, timeline.scheduled_ns)


def prefill_ns(timeline: RequestTimeline) -> int | None:
    return _between(timeline.scheduled_ns, _first(timeline.token_ns))


def first_write_ns(timeline: RequestTimeline) -> int | None:
    return _between(_first(timeline.token_ns), _first(timeline.write_ns))


def time_to_first_token_ns(timeline: RequestTimeline) -> int | None:
    return _between(timeline.recv_ns, _first(timeline.write_ns))


def engine_time_to_first_token_ns(timeline: RequestTimeline) -> int | None:
    return _between(timeline.tokenized_ns, _first(timeline.token_ns))


def time_per_output_token_ns(timeline: RequestTimeline) -> float | None:
    """Mean gap between tokens; None below two tokens."""
    stamps = timeline.token_ns
    return (stamps[-1] - stamps[0]) / (len(stamps) - 1) if len(stamps) > 1 else None


def stream_gaps_ns(timeline: RequestTimeline) -> list[int]:
    """Between each write and the one before it."""
    return [later - earlier for earlier, later in pairwise(timeline.write_ns)]


def request_duration_ns(timeline: RequestTimeline) -> int | None:
    return _between(timeline.recv_ns, timeline.end_ns)
