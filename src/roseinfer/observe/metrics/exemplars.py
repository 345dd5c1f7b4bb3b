"""Keeps the exemplars of histograms: which value, in which bucket, came with which trace and step.

An exemplar must name a trace that can be found, so it is put here once its trace is kept. Of each bucket the newest
stays.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from roseinfer.observe.gaps import intervals
from roseinfer.observe.metrics.catalogue import NS_PER_S, api, is_streamed
from roseinfer.observe.metrics.histogram import TOKEN_S
from roseinfer.records import RequestTimeline

TIME_TO_FIRST_TOKEN = "roseinfer_time_to_first_token_seconds"  # noqa: S105 - a metric's name
INTER_TOKEN_LATENCY = "roseinfer_inter_token_latency_seconds"  # noqa: S105 - likewise
REQUEST_DURATION = "roseinfer_request_duration_seconds"
WITH_EXEMPLARS = frozenset({TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY, REQUEST_DURATION})

StepIdOf = Callable[[int], int | None]


class Exemplar(msgspec.Struct, frozen=True, gc=False):
    """One observed value and where it came from."""

    value_s: float
    at_ns: int  # when it was known
    trace_id: str
    step_id: int | None  # that ended it
    span_id: int  # of the request
    label_values: tuple[str, ...] = ()  # of its metric's own labels

    @property
    def labels(self) -> dict[str, str]:
        """At most 93 characters of the 128 that OpenMetrics allows."""
        step = {} if self.step_id is None else {"step_id": str(self.step_id)}
        return {"trace_id": self.trace_id, "span_id": f"{self.span_id:016x}", **step}


class ExemplarShelf:
    """The newest exemplar of each bucket of one histogram's series."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self.newest: list[Exemplar | None] = [None] * (len(self._bounds) + 1)  # the unbounded bucket's last

    def put(self, exemplar: Exemplar) -> None:
        index = bisect_left(self._bounds, exemplar.value_s)
        present = self.newest[index]
        if present is None or present.at_ns <= exemplar.at_ns:
            self.newest[index] = exemplar

    def forget(self, trace_id: str) -> None:
        """Removes the exemplars of a trace that will not be found after all."""
        self.newest = [None if kept and kept.trace_id == trace_id else kept for kept in self.newest]


def of_gap(timeline: RequestTimeline, index: int, step_id: int | None, span_id: int) -> Exemplar:
    """Returns the exemplar of the inter-token latency that ended with token `index` >= 1."""
    start_ns, end_ns = timeline.token_ns[index - 1], timeline.token_ns[index]
    return Exemplar((end_ns - start_ns) / NS_PER_S, end_ns, timeline.trace_id, step_id, span_id)


def of_request(timeline: RequestTimeline, step_id_of: StepIdOf, span_id: int) -> Iterator[tuple[str, Exemplar]]:
    """Yields metric and exemplar for each bucket in which a request that has ended was counted."""
    tokens = timeline.token_ns
    first_token_ns = intervals.time_to_first_token_ns(timeline)
    if first_token_ns is not None:
        step_id, at_ns = step_id_of(tokens[0]), timeline.write_ns[0]
        value_s, streamed = first_token_ns / NS_PER_S, is_streamed(timeline)
        yield TIME_TO_FIRST_TOKEN, Exemplar(value_s, at_ns, timeline.trace_id, step_id, span_id, streamed)
    duration_ns = intervals.request_duration_ns(timeline)
    if duration_ns is not None:
        step_id = step_id_of(tokens[-1]) if tokens else None
        value_s = duration_ns / NS_PER_S
        yield REQUEST_DURATION, Exemplar(value_s, timeline.end_ns, timeline.trace_id, step_id, span_id, api(timeline))
    for index in _newest_in_each_bucket(tokens):
        yield INTER_TOKEN_LATENCY, of_gap(timeline, index, step_id_of(tokens[index]), span_id)


def _newest_in_each_bucket(token_ns: Sequence[int]) -> list[int]:
    """Returns the index of the token that ended the last gap of each bucket that has one."""
    if len(token_ns) < 2:
        return []
    buckets = np.searchsorted(np.asarray(TOKEN_S), np.diff(np.asarray(token_ns, np.int64)) / NS_PER_S, side="left")
    _, from_behind = np.unique(buckets[::-1], return_index=True)
    return [len(token_ns) - 1 - int(index) for index in from_behind]
