"""The figures of benchmark reports, as a client saw them; the server's latencies are in `observe/gaps/intervals.py`.

`RequestTimes` has the engine's stamps of a request and `Observed` its client's, in nanoseconds of the host's monotonic
clock. The order of the engine's stamps is

    target, submit_start, submit_end, tokenized, inbox, scheduled, token[0], ..., token[n-1], end

except that `tokenized` comes before `submit_end` when the submission itself tokenises, and that a request may go out
before its target. Those two differences count as 0 then; any other stamp before its predecessor is an error. Intervals
that the server measures too come from `observe/gaps/intervals.py`. Token stamps are the engine's, one for each step;
flushes, which are what a consumer sees, do not count for ITL.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from roseinfer.observe.gaps import intervals
from roseinfer.records import RequestTimeline


class Observed(msgspec.Struct, kw_only=True):
    """One request as its client saw it. A stamp of 0 was not reached.

    Latencies count tokens: a chunk of k tokens that comes a gap after the chunk before it is k inter-token latencies of
    gap / k, so a stream that is sent in larger pieces is neither faster nor slower.
    """

    request_id: str
    intended_ns: int
    sent_ns: int = 0  # the head of the request was written
    token_ns: list[int] = []  # of each chunk with tokens: when its last byte had been read
    token_counts: list[int] = []  # tokens in each of these
    end_ns: int = 0
    num_prompt_tokens: int = 0  # by the server's usage
    num_cached_tokens: int | None = None  # of these, likewise; None where the server does not report it
    finish_reason: str = ""
    status: int = 0  # of HTTP
    retry_after_s: int | None = None
    error: str = ""  # the request was refused, or its stream broke
    was_aborted: bool = False  # by its client, as planned
    ledger: dict[str, Any] | None = None

    @property
    def is_complete(self) -> bool:
        return not self.error and not self.was_aborted and bool(self.token_ns)

    @property
    def num_tokens(self) -> int:
        return sum(self.token_counts)

    @property
    def submit_lag_ns(self) -> int:
        """M1: how late the request was sent."""
        return max(0, self.sent_ns - self.intended_ns)

    @property
    def ttft_ns(self) -> int:
        """M6: time to first token. In the engine's stamps (tokenized - submit_start) + queue wait + prefill."""
        return self.token_ns[0] - self.sent_ns

    @property
    def tpot_ns(self) -> float | None:
        """M7: time per output token after the first chunk; None with one chunk."""
        num_later = self.num_tokens - self.token_counts[0]
        return (self.token_ns[-1] - self.token_ns[0]) / num_later if num_later else None

    @property
    def latency_ns(self) -> int:
        """M9: from sending to the end."""
        return self.end_ns - self.sent_ns

    def inter_token_latencies_ns(self) -> list[float]:
        """M8: one for each token after the first chunk."""
        gaps = zip(self.chunk_gaps_ns(), self.token_counts[1:], strict=True)
        return [gap / count for gap, count in gaps for _ in range(count)]

    def chunk_gaps_ns(self) -> list[int]:
        return gaps_of(self.token_ns)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """The engine's and the load generator's stamps of one finished request that generated at least one token."""

    timeline: RequestTimeline
    submit_start: int
    submit_end: int
    target: int | None  # when it was due, under an absolute schedule with an interval

    def __post_init__(self) -> None:
        """Raises ValueError for a stamp that is missing or lies before its predecessor."""
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

    @property
    def seen(self) -> Observed:
        """M1 and M6 to M9: the request as the caller of the submission sees it, a chunk for each token."""
        times = self.timeline
        return Observed(
            request_id=times.request_id,
            intended_ns=self.submit_start if self.target is None else self.target,
            sent_ns=self.submit_start,
            token_ns=times.token_ns,
            token_counts=[1] * len(times.token_ns),
            end_ns=times.end_ns,
        )


def add_request_latency(times: RequestTimes) -> int:
    """M2: how long the submission held up its caller."""
    return times.submit_end - times.submit_start


def tokenize(times: RequestTimes) -> int:
    """M3: tokenising after the submission returned; 0 when it was done before or inside."""
    return max(0, times.timeline.tokenized_ns - times.submit_end)


def queue_wait(times: RequestTimes) -> int:
    """M4: from the prompt's tokens being ready until the first batch."""
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


def tpot_to_end(times: RequestTimes) -> float:
    """M7 as the scheduler benchmark has it: up to the end, which is known a little after the last token."""
    tokens = times.timeline.token_ns
    return (times.timeline.end_ns - tokens[0]) / max(1, len(tokens) - 1)


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


def percentile(values: Sequence[float], percent: float) -> float:
    """M12: interpolates linearly between the two nearest ranks. There must be at least one value."""
    return float(np.percentile(values, percent))


def gaps_of(stamps: Sequence[int]) -> list[int]:
    """Between each stamp and the one before it."""
    return [later - earlier for earlier, later in pairwise(stamps)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _boundary(requests: Sequence[RequestTimes]) -> int:
    return max(times.timeline.token_ns[0] for times in requests)


def _lived(interval_ns: int | None) -> int:
    """The interval of a request that has all its stamps."""
    assert interval_ns is not None
    return interval_ns
