"""What was seen of the requests of a load, by a client, the simulator or a recording, into latencies. Sends nothing.

TTFT, TPOT and ITL are counted by tokens: a chunk with k tokens that comes a gap after the one before is k
inter-token latencies of a k-th of the gap, so a stream that is sent in larger pieces is not called faster or slower.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from roseinfer.bench import definitions as d
from roseinfer.bench.seeds.report import Pool


class Observed(msgspec.Struct, kw_only=True):
    """One request. Stamps are nanoseconds of one monotonic clock; 0 was not reached."""

    request_id: str
    intended_ns: int
    sent_ns: int = 0  # the head of the request was written
    token_ns: list[int] = []  # one for each chunk with tokens: when its last byte had been read
    token_counts: list[int] = []  # tokens in each of these
    end_ns: int = 0
    num_prompt_tokens: int = 0  # by the server's usage
    num_cached_tokens: int | None = None  # of these, likewise; None where the server does not tell
    finish_reason: str = ""
    error: str = ""  # it was refused, or its stream broke
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
        """How late it was sent."""
        return max(0, self.sent_ns - self.intended_ns)

    @property
    def ttft_ns(self) -> int:
        return self.token_ns[0] - self.sent_ns

    @property
    def tpot_ns(self) -> float | None:
        """Time per output token after the first chunk; None with one chunk."""
        num_later = self.num_tokens - self.token_counts[0]
        return (self.token_ns[-1] - self.token_ns[0]) / num_later if num_later else None

    @property
    def latency_ns(self) -> int:
        return self.end_ns - self.sent_ns

    def inter_token_latencies_ns(self) -> list[float]:
        """One for each token after the first chunk."""
        gaps = [later - earlier for earlier, later in pairwise(self.token_ns)]
        return [gap / count for gap, count in zip(gaps, self.token_counts[1:], strict=True) for _ in range(count)]

    def chunk_gaps_ns(self) -> list[int]:
        return [later - earlier for earlier, later in pairwise(self.token_ns)]


class Objective(NamedTuple):
    """What a request must keep to count as good. None asks for nothing."""

    ttft_ns: float | None
    tpot_ns: float | None

    def is_met(self, request: Observed) -> bool:
        """A request of one token has no TPOT to miss."""
        tpot_ns = request.tpot_ns
        return (self.ttft_ns is None or request.ttft_ns <= self.ttft_ns) and (
            self.tpot_ns is None or tpot_ns is None or tpot_ns <= self.tpot_ns
        )


class Verdict(NamedTuple):
    """Whether the generator kept its own schedule well enough for its figures to be the server's."""

    lag_p99_ns: float
    interval_ns: float  # 0: a burst, in which nothing can be late against an interval
    max_share: float

    @property
    def is_valid(self) -> bool:
        return not self.interval_ns or self.lag_p99_ns <= self.max_share * self.interval_ns

    def line(self) -> str:
        late = f"the first request of each moment was {self.lag_p99_ns / 1e6:.2f} ms late at p99"
        if not self.interval_ns:
            return f"Load generator: {late}; a burst has no interval to hold it against"
        share = f"{self.lag_p99_ns / self.interval_ns:.1%} of the interval of {self.interval_ns / 1e6:.3f} ms"
        valid = "valid" if self.is_valid else "INVALID"
        return f"Load generator: {valid}, {late}, {share}; {self.max_share:.1%} is allowed"


def mean_interval_ns(offsets_ns: Iterable[int]) -> float:
    """Between neighbouring moments at which something is due; 0 for a burst, which is one moment."""
    moments = set(offsets_ns)
    return (max(moments) - min(moments)) / (len(moments) - 1) if len(moments) > 1 else 0.0


def latency_pools(requests: Iterable[Observed]) -> list[Pool]:
    """The distributions of those that completed; one without a value is left out."""
    complete = [request for request in requests if request.is_complete]
    tpots = [request.tpot_ns for request in complete]
    pools = [
        Pool("TTFT", [request.ttft_ns for request in complete]),
        Pool("TPOT", [tpot for tpot in tpots if tpot is not None], "ms/token"),
        Pool("ITL", [gap for request in complete for gap in request.inter_token_latencies_ns()]),
        Pool("Latency", [request.latency_ns for request in complete]),
    ]
    return [pool for pool in pools if pool.values]


def lag_p99_ns(requests: Iterable[Observed]) -> float:
    """The 99th percentile of the submit lag over all moments at which something was due; 0 when nothing was sent.

    A moment's lag is that of the first request that went out: of those that are due together, the others have to wait
    for it, and how long that takes is the burst's size and not a generator that is late.
    """
    lags: dict[int, int] = {}
    for request in requests:
        if request.sent_ns:
            lags[request.intended_ns] = min(request.submit_lag_ns, lags.get(request.intended_ns, request.submit_lag_ns))
    return d.percentile(list(lags.values()), 99) if lags else 0.0


def duration_s(requests: Sequence[Observed]) -> float:
    """From the first request that was sent to the end of the last."""
    return (
        max(request.end_ns for request in requests) - min(request.sent_ns or request.end_ns for request in requests)
    ) / 1e9
