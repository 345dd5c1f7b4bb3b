"""Socket writes one by one in, columns of them out; knows neither who makes the writes nor what is read out of them.

There are as many writes as tokens. As columns they are judged and recorded some dozens at a time, by a handful of NumPy
calls: one by one, each would find the objects of the one before it gone from the processor's caches.
"""

import numpy as np
import numpy.typing as npt

from roseinfer.records import Arrival, Delivery, Observer, RequestTimeline

_OWN = ("serial", "start_ns", "resumed_ns", "encoded_ns", "written_ns", "was_paused")
_OF_ARRIVALS = ("tokens_ns", "sent_ns", "read_ns", "was_delayed")
COLUMNS = (*_OWN, *_OF_ARRIVALS)
"""`serial` is the request's, `start_ns` when its write before this one returned, 0 for the first. `was_delayed` is
1 if a collection or a full outbox delayed the tokens on their way to the front end."""

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
            self._columns = self._own() | self._of_arrivals()
        return self._columns

    def _own(self) -> dict[str, Column]:
        """What each write has for itself. By way of a list: an `array` takes its values three times as slowly."""
        values: list[int] = []
        for timeline, delivery in zip(self.timelines, self.deliveries, strict=True):
            index = delivery.index
            values.extend(
                (
                    timeline.serial,
                    timeline.write_ns[index - 1] if index else 0,
                    delivery.resumed_ns,
                    delivery.encoded_ns,
                    delivery.written_ns,
                    delivery.was_paused,
                )
            )
        return _columns(_OWN, values)

    def _of_arrivals(self) -> dict[str, Column]:
        """What all writes with the tokens of one step share; they mostly come one after the other."""
        values, counts = list[int](), list[int]()
        last: Arrival | None = None
        for delivery in self.deliveries:
            if delivery.arrival is last:
                counts[-1] += 1
                continue
            last = delivery.arrival
            counts.append(1)
            values.extend((last.tokens_ns, last.sent_ns, last.read_ns, bool(last.gc_ns or last.was_held)))
        return {name: column.repeat(counts) for name, column in _columns(_OF_ARRIVALS, values).items()}


def _columns(names: tuple[str, ...], values: list[int]) -> dict[str, Column]:
    table = np.fromiter(values, np.int64, len(values)).reshape(-1, len(names))
    return dict(zip(names, np.ascontiguousarray(table.T), strict=True))


class WriteObserver(Observer):
    """An observer that is told writes, together: after the steps that made their tokens, before ends of requests."""

    def on_writes(self, writes: Writes) -> None:
        """These writes have returned since it was told last."""
