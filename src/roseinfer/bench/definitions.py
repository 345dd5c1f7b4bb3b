"""What each number of a report means: from the stamps of a request to lag, wait, TTFT, TPOT, ITL and throughput.

Times are integers of nanoseconds on the host's monotonic clock, in the order

    target, submit_start, submit_end, tokenize_done, admit, token[0], ..., token[n-1], finish

except that `tokenize_done` lies before `submit_end` when the submission itself tokenises. Token stamps are the
engine's, one for each step; `writes` are the flushes that a consumer sees, and are never used for ITL.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from roseinfer.records import RequestTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """The stamps of one finished request that generated at least one token."""

    target: int | None  # when it was due, under an absolute schedule with an interval
    submit_start: int
    submit_end: int
    tokenize_done: int
    admit: int  # the engine took it into a batch for the first time
    tokens: Sequence[int]
    writes: Sequence[int]
    finish: int  # its end was known to the front end
    inbox: int  # the engine's loop took it from its inbox
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @classmethod
    def of(cls, timeline: RequestTimeline, submit_start: int, submit_end: int, target: int | None) -> "RequestTimes":
        """The load generator's stamps and the engine's, put together."""
        return cls(
            target=target,
            submit_start=submit_start,
            submit_end=submit_end,
            tokenize_done=timeline.tokenized_ns,
            admit=timeline.scheduled_ns,
            tokens=tuple(timeline.token_ns),
            writes=tuple(timeline.write_ns),
            finish=timeline.end_ns,
            inbox=timeline.inbox_ns,
            num_prompt_tokens=timeline.num_prompt_tokens,
            num_cached_tokens=timeline.num_cached_tokens,
            num_preemptions=timeline.num_preemptions,
        )


def submit_lag(times: RequestTimes) -> int | None:
    """M1: how late the load generator itself was; read queue wait and TTFT with it. None without a target."""
    return None if times.target is None else max(0, times.submit_start - times.target)


def add_request_latency(times: RequestTimes) -> int:
    """M2: how long the submission held up its caller."""
    return times.submit_end - times.submit_start


def tokenize(times: RequestTimes) -> int:
    """M3: tokenising that went on after the submission returned; 0 when it was done before or inside."""
    return max(0, times.tokenize_done - times.submit_end)


def queue_wait(times: RequestTimes) -> int:
    """M4: a request that was ready, tokens and all, waited so long for its first batch."""
    return max(0, times.admit - times.tokenize_done)


def prefill_to_first_token(times: RequestTimes) -> int:
    """M5: prefill and the sampling of the first token."""
    return max(0, times.tokens[0] - times.admit)


def ttft(times: RequestTimes) -> int:
    """M6: time to first token. Always (tokenize_done - submit_start) + queue_wait + prefill_to_first_token."""
    return times.tokens[0] - times.submit_start


def tpot(times: RequestTimes) -> float | None:
    """M7: time per output token after the first. None with fewer than two tokens."""
    if len(times.tokens) < 2:
        return None
    return (times.tokens[-1] - times.tokens[0]) / (len(times.tokens) - 1)


def tpot_to_finish(times: RequestTimes) -> float:
    """M7 as the scheduler benchmark has it: up to the finish, which is known a little after the last token."""
    return (times.finish - times.tokens[0]) / max(1, len(times.tokens) - 1)


def inter_token_latencies(times: RequestTimes) -> list[int]:
    """M8: every gap between two neighbouring tokens, to be pooled over all requests."""
    return _gaps(times.tokens)


def latency(times: RequestTimes) -> int:
    """M9: from submission to finish."""
    return times.finish - times.submit_start


def throughput(requests: Sequence[RequestTimes]) -> float:
    """M10: completion tokens per second, from the first submission to the last finish."""
    wall = max(times.finish for times in requests) - min(times.submit_start for times in requests)
    return sum(len(times.tokens) for times in requests) / (wall / 1e9)


def flush_gaps(times: RequestTimes) -> list[int]:
    """M14: gaps between flushes, which grow with the stream interval as ITL does not."""
    return _gaps(times.writes)


def engine_submit_lag(times: RequestTimes) -> int:
    """The first part of M4: from the tokens being ready until the engine's loop held the request."""
    return max(0, times.inbox - times.tokenize_done)


def engine_queue_wait(times: RequestTimes) -> int:
    """The second part of M4: in the engine, waiting to be scheduled."""
    return max(0, times.admit - times.inbox)


def split_elapsed(requests: Sequence[RequestTimes]) -> tuple[int, int]:
    """M13: prefill elapsed, until every request has its first token, and decode elapsed, from there to the end."""
    start = min(times.submit_start for times in requests)
    boundary = max(times.tokens[0] for times in requests)
    return boundary - start, max(times.finish for times in requests) - boundary


def num_decode_tokens(requests: Sequence[RequestTimes]) -> int:
    """Tokens that came in decode elapsed, so those that its rate may count."""
    boundary = max(times.tokens[0] for times in requests)
    return sum(stamp > boundary for times in requests for stamp in times.tokens)


def percentile(values: Iterable[float], percent: float) -> float:
    """M12: by linear interpolation between the two nearest ranks. There must be at least one value."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _gaps(stamps: Sequence[int]) -> list[int]:
    return [later - earlier for earlier, later in pairwise(stamps)]
