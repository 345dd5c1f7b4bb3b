"""What each number of a report means: from the stamps of a request to lag, wait, TTFT, TPOT, ITL and throughput.

Times are integers of nanoseconds on the host's monotonic clock, in the order

    target, submit_start, submit_end, tokenized, inbox, scheduled, token[0], ..., token[n-1], end

except that `tokenized` lies before `submit_end` when the submission itself tokenises, and that a request may go out
before its target. Those two differences are 0 when they would be negative; any other stamp before its predecessor is an
error. What the server measures too is `observe/gaps/intervals.py`'s. Token stamps are the engine's, one for each step;
the stamps of flushes are what a consumer sees, and are never used for ITL.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from roseinfer.observe.gaps import intervals
from roseinfer.records import RequestTimeline


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """The stamps of one finished request that generated at least one token: the engine's and the load generator's."""

    timeline: RequestTimeline
    submit_start: int
    submit_end: int
    target: int | None  # when it was due, under an absolute schedule with an interval

    def __post_init__(self) -> None:
        """Raises ValueError for a stamp that is missing or lies before its predecessor: it would spoil every figure."""
        times = self.timeline
        ready = (times.tokenized_ns, times.inbox_ns, times.scheduled_ns)
        for stamps in (
            (self.submit_start, self.submit_end),
            (self.submit_start, *ready, *times.token_ns, times.end_ns),
        ):
            if any(later < earlier for earlier, later in pairwise(stamps)):
                raise ValueError(f"The stamps of {times.request_id} are not in order: {stamps}.")
        if not times.token_ns:
            raise ValueError(f"{times.request_id} has no token.")


def submit_lag(times: RequestTimes) -> int | None:
    """M1: how late the load generator itself was; read queue wait and TTFT with it. None without a target."""
    return None if times.target is None else max(0, times.submit_start - times.target)


def add_request_latency(times: RequestTimes) -> int:
    """M2: how long the submission held up its caller."""
    return times.submit_end - times.submit_start


def tokenize(times: RequestTimes) -> int:
    """M3: tokenising that went on after the submission returned; 0 when it was done before or inside."""
    return max(0, times.timeline.tokenized_ns - times.submit_end)


def queue_wait(times: RequestTimes) -> int:
    """M4: a request that was ready, tokens and all, waited for its first batch."""
    return engine_submit_lag(times) + engine_queue_wait(times)


def engine_submit_lag(times: RequestTimes) -> int:
    """The first part of M4: from the tokens being ready until the engine's loop held the request."""
    return _lived(intervals.submit_lag_ns(times.timeline))


def engine_queue_wait(times: RequestTimes) -> int:
    """The second part of M4: in the engine, waiting to be scheduled."""
    return _lived(intervals.queue_wait_ns(times.timeline))


def prefill_to_first_token(times: RequestTimes) -> int:
    """M5: prefill and the sampling of the first token."""
    return _lived(intervals.prefill_ns(times.timeline))


def ttft(times: RequestTimes) -> int:
    """M6: time to first token. Always (tokenized - submit_start) + queue_wait + prefill_to_first_token."""
    return times.timeline.token_ns[0] - times.submit_start


def tpot(times: RequestTimes) -> float | None:
    """M7: time per output token after the first. None with fewer than two tokens."""
    return intervals.time_per_output_token_ns(times.timeline)


def tpot_to_end(times: RequestTimes) -> float:
    """M7 as the scheduler benchmark has it: up to the end, which is known a little after the last token."""
    tokens = times.timeline.token_ns
    return (times.timeline.end_ns - tokens[0]) / max(1, len(tokens) - 1)


def inter_token_latencies(times: RequestTimes) -> list[int]:
    """M8: every gap between two neighbouring tokens, to be pooled over all requests."""
    return [later - earlier for earlier, later in pairwise(times.timeline.token_ns)]


def latency(times: RequestTimes) -> int:
    """M9: from submission to end."""
    return times.timeline.end_ns - times.submit_start


def throughput(requests: Sequence[RequestTimes]) -> float:
    """M10: completion tokens per second, from the first submission to the last end."""
    return sum(len(times.timeline.token_ns) for times in requests) / (sum(split_elapsed(requests)) / 1e9)


def flush_gaps(times: RequestTimes) -> list[int]:
    """M14: gaps between flushes, which grow with the stream interval as ITL does not."""
    return intervals.stream_gaps_ns(times.timeline)


def split_elapsed(requests: Sequence[RequestTimes]) -> tuple[int, int]:
    """M13: prefill elapsed, until every request has its first token, and decode elapsed, from there to the end."""
    start = min(times.submit_start for times in requests)
    boundary = _boundary(requests)
    return boundary - start, max(times.timeline.end_ns for times in requests) - boundary


def num_decode_tokens(requests: Sequence[RequestTimes]) -> int:
    """Tokens that came in decode elapsed, so those that its rate may count."""
    boundary = _boundary(requests)
    return sum(stamp > boundary for times in requests for stamp in times.timeline.token_ns)


def percentile(values: Iterable[float], percent: float) -> float:
    """M12: by linear interpolation between the two nearest ranks. There must be at least one value."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _boundary(requests: Sequence[RequestTimes]) -> int:
    return max(times.timeline.token_ns[0] for times in requests)


def _lived(interval_ns: int | None) -> int:
    """The interval of a request that has all its stamps."""
    assert interval_ns is not None
    return interval_ns
