"""The service level objectives: which events are good, and which are counted.

An objective of latency has a bound of its histogram's buckets as its threshold, so the share of good events is exact.
"""

from typing import NamedTuple

BY = "namespace, job, model_name"


class Objective(NamedTuple):
    """One promise: the share `wanted` of events is good, in a window of 30 days.

    `good` and `all` are PromQL of rates over @WINDOW@, as promql.py completes it.
    """

    key: str  # in the names of recorded series: roseinfer:<key>_good:ratio_rate5m
    name: str  # in the names of alerts
    title: str
    bad: str  # what a bad event is, in the plural, for sentences
    wanted: str
    good: str
    all: str
    threshold: str = ""  # `le`, where being late is being bad
    min_per_second: str = "0.1"  # below so many events a second no alert is worth a page


def _rate(series: str) -> str:
    return f"sum by ({BY}) (rate(roseinfer_{series}[@WINDOW@]))"


TTFT = Objective(
    key="ttft",
    name="TTFT",
    title="Time to first token",
    bad="first tokens came later than",
    wanted="0.99",
    threshold="0.5",
    good=_rate('time_to_first_token_seconds_bucket{le="@TTFT_SECONDS@",streamed="true"}'),
    all=_rate('time_to_first_token_seconds_count{streamed="true"}'),
)
ITL = Objective(
    key="itl",
    name="ITL",
    title="Inter-token latency",
    bad="gaps between tokens were longer than",
    wanted="0.99",
    threshold="0.05",
    min_per_second="1",
    good=_rate('inter_token_latency_seconds_bucket{le="@ITL_SECONDS@"}'),
    all=_rate("inter_token_latency_seconds_count"),
)
AVAILABILITY = Objective(
    key="avail",
    name="Availability",
    title="Availability",
    bad="requests failed or were refused",
    wanted="0.999",
    good=_rate('requests_total{finish_reason=~"@SERVED@"}'),
    all=_rate('requests_total{finish_reason=~"@SERVED_OR_FAILED@"}')
    + " + "
    + _rate('requests_rejected_total{code=~"@REFUSED_BY_US@"}'),  # the others are mistakes of clients
)
OBJECTIVES = (TTFT, ITL, AVAILABILITY)
