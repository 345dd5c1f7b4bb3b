"""Socket writes one by one in, columns of them out; knows neither who makes the writes nor what is read out of them.

There are as many writes as tokens. As columns they are judged and recorded some dozens at a time, by a handful of NumPy
calls: one by one, each would find the objects of the one before it gone from the processor's caches.
"""

from array import array

import numpy as np
import numpy.typing as npt

from roseinfer.records import Delivery, Observer, RequestTimeline

COLUMNS = (
    *("serial", "start_ns", "tokens_ns", "sent_ns", "read_ns", "resumed_ns", "encoded_ns", "written_ns"),
    *("was_paused", "is_plain"),
)
"""`serial` is the request's, `start_ns` when its write before this one returned, 0 for the first. `is_plain` is 1
unless a collection, a full outbox or the client delayed the tokens on their way."""

Column = npt.NDArray[np.int64]


class Writes:
    """Some writes, in the order in which they returned."""

    def __init__(self) -> None:
        self.timelines: list[RequestTimeline] = []
        self.deliveries: list[Delivery] = []
        self._columns: dict[str, Column] = {}

    def __len__(self) -> int:
        return len(self.timelines)

    def add(self, timeline: RequestTimeline, delivery: Delivery) -> None:
        """One more. The timeline holds its stamp already, and nobody has asked for columns."""
        self.timelines.append(timeline)
        self.deliveries.append(delivery)

    def columns(self) -> dict[str, Column]:
        """Each of COLUMNS, `(num_writes,)`; made once, for all who ask, and not while a write waits to return."""
        if not self._columns:
            values = array("q")
            for timeline, delivery in zip(self.timelines, self.deliveries, strict=True):
                index, arrival, was_paused = delivery.index, delivery.arrival, delivery.was_paused
                values.extend(
                    (
                        timeline.serial,
                        timeline.write_ns[index - 1] if index else 0,
                        arrival.tokens_ns,
                        arrival.sent_ns,
                        arrival.read_ns,
                        delivery.resumed_ns,
                        delivery.encoded_ns,
                        delivery.written_ns,
                        was_paused,
                        not (was_paused or arrival.gc_ns or arrival.was_held),
                    )
                )
            table = np.frombuffer(values, np.int64).reshape(-1, len(COLUMNS))
            self._columns = dict(zip(COLUMNS, np.ascontiguousarray(table.T), strict=True))
        return self._columns


class WriteObserver(Observer):
    """An observer that is told writes, together: after the steps that made their tokens, before ends of requests."""

    def on_writes(self, writes: Writes) -> None:
        """These writes have returned since it was told last."""
