"""The service level objectives: which events are good, and which are counted.

An objective of latency has a bound of its histogram's buckets as its threshold, so the share of good events is exact.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from monitoring.promql import Queries, bound
from roseinfer.errors import RoseinferError
from roseinfer.observe.metrics.catalogue import OTHER, REJECTION_CODES
from roseinfer.records import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One promise: the share `wanted` of events is good, in a window of 30 days."""

    key: str  # in the names of recorded series: roseinfer:<key>_good:ratio_rate5m
    name: str  # in the names of alerts
    title: str
    bad: str  # what a bad event is, in the plural, for sentences
    wanted: str
    threshold: str = ""  # `le`, where being late is being bad
    min_per_second: str = "0.1"  # below so many events a second no alert is worth a page
    good: Callable[[str, Queries], str]  # of the threshold
    all: Callable[[Queries], str]

    def good_rate(self, over: Queries) -> str:
        return self.good(self.threshold, over)


def _codes(root: type[RoseinferError]) -> Iterator[tuple[str, int]]:
    if root.code is not None:
        yield root.code, root.status
    for leaf in root.__subclasses__():
        yield from _codes(leaf)


# A refusal with 429 or 5xx is the server's; `other` is an unforeseen 500. The other codes are mistakes of clients.
_OURS = {OTHER, *(code for code, status in _codes(RoseinferError) if status == 429 or status >= 500)}
REFUSED_BY_US = "|".join(code for code in REJECTION_CODES if code in _OURS)
FAILED = f"{FinishReason.ERROR}|{FinishReason.TIMEOUT}"
SERVED = "|".join(reason for reason in FinishReason if reason not in (*FAILED.split("|"), FinishReason.REJECTED))

BY = "namespace, job, model_name"


def _served(_: str, over: Queries) -> str:
    return over.total("requests_total", BY, finish_reason=SERVED)


def asked(over: Queries, by: str = BY) -> str:
    """All requests but those that were refused for a mistake of the client's."""
    ended = over.total("requests_total", by, finish_reason=f"{SERVED}|{FAILED}")
    return f"{ended} + {over.total('requests_rejected_total', by, code=REFUSED_BY_US)}"


TTFT = Objective(
    key="ttft",
    name="TTFT",
    title="Time to first token",
    bad="first tokens came later than",
    wanted="0.99",
    threshold=bound(0.5),
    good=lambda threshold, over: over.total("time_to_first_token_seconds_bucket", BY, le=threshold, streamed="true"),
    all=lambda over: over.total("time_to_first_token_seconds_count", BY, streamed="true"),
)
ITL = Objective(
    key="itl",
    name="ITL",
    title="Inter-token latency",
    bad="gaps between tokens were longer than",
    wanted="0.99",
    threshold=bound(0.05),
    min_per_second="1",
    good=lambda threshold, over: over.total("inter_token_latency_seconds_bucket", BY, le=threshold),
    all=lambda over: over.total("inter_token_latency_seconds_count", BY),
)
AVAILABILITY = Objective(
    key="avail",
    name="Availability",
    title="Availability",
    bad="requests failed or were refused",
    wanted="0.999",
    good=_served,
    all=asked,
)
OBJECTIVES = (TTFT, ITL, AVAILABILITY)
