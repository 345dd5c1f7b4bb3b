"""Gives each fact to every observer that hears it; drops an observer that raises, so that no request fails for it.

Steps, writes and ends of requests wait a little, and observers get several of each: an engine on the same processor
leaves nothing in its caches, so each delivery pays for fetching all the code and data that observers touch. What waits
is delivered before an observer is asked, before the server's state changes, and when a request fails.
"""

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Generic, ParamSpec

import numpy as np
import numpy.typing as npt

from roseinfer.records import (
    Advanced,
    Arrival,
    Delivery,
    LifecycleState,
    Observer,
    RequestTimeline,
    StepRecord,
    Violation,
)

logger = logging.getLogger(__name__)

MAX_DELAY_S = 0.2
MAX_STEPS = 8  # that wait: delivering eight holds the event loop, which also serves streams, for about a millisecond
MAX_ENDS = 16  # that wait, for the same reason

_FACTS = (
    *("on_lifecycle", "on_start", "on_refusal", "on_step", "on_write", "on_finish"),
    *("on_stall", "on_rest", "on_resume"),
)
_Facts = list[tuple[str, tuple[Any, ...]]]
_What = ParamSpec("_What")

OWN = ("serial", "start_ns", "resumed_ns", "encoded_ns", "written_ns", "was_paused")
_OF_ARRIVALS = ("tokens_ns", "sent_ns", "read_ns", "was_delayed")
COLUMNS = (*OWN, *_OF_ARRIVALS)
"""`serial` is the request's, `start_ns` when its write before this one returned, 0 for the first. `was_delayed` is
1 if a collection, the lack of a core or a full outbox delayed the tokens on their way to the front end."""

Column = npt.NDArray[np.int64]


class Writes:
    """Some writes, in the order in which they returned."""

    def __init__(self, timelines: Sequence[RequestTimeline], own: Column, arrivals: list[tuple[Arrival, int]]) -> None:
        """`own` has a row for each of OWN, `(len(OWN), num_writes)`.

        `arrivals` are those of their tokens, each with the count of its writes: the writes with the tokens of one step
        mostly follow one another, so they are few.
        """
        self.timelines = timelines
        self.own = own
        self.arrivals = arrivals
        self._columns: dict[str, Column] = {}

    @classmethod
    def of(cls, timelines: list[RequestTimeline], deliveries: Sequence[Delivery]) -> "Writes":
        """Makes them of deliveries whose stamps the timelines already hold."""
        values: list[int] = []  # an `array` takes them three times as slowly
        for timeline, delivery in zip(timelines, deliveries, strict=True):
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
        arrivals = [(arrival, len([*run])) for arrival, run in groupby(deliveries, attrgetter("arrival"))]
        return cls(timelines, _table(values, len(OWN)), arrivals)

    @classmethod
    def joined(cls, pieces: Sequence["Writes"]) -> "Writes":
        """Joins them in their order."""
        if len(pieces) == 1:
            return pieces[0]
        timelines = [timeline for piece in pieces for timeline in piece.timelines]
        arrivals = [arrival for piece in pieces for arrival in piece.arrivals]
        return cls(timelines, np.concatenate([piece.own for piece in pieces], axis=1), arrivals)

    def __len__(self) -> int:
        return len(self.timelines)

    def columns(self) -> dict[str, Column]:
        """Returns each of COLUMNS, `(num_writes,)`."""
        if not self._columns:
            values, counts = list[int](), list[int]()
            for arrival, count in self.arrivals:
                was_delayed = bool(arrival.delayed_ns or arrival.was_held)
                values.extend((arrival.tokens_ns, arrival.sent_ns, arrival.read_ns, was_delayed))
                counts.append(count)
            of_arrivals = _table(values, len(_OF_ARRIVALS)).repeat(counts, axis=1)
            self._columns = dict(zip(COLUMNS, (*self.own, *of_arrivals), strict=True))
        return self._columns

    def delivery(self, at: int) -> Delivery:
        """Returns one of them in full, which takes as long as the columns of dozens."""
        _, _, resumed_ns, encoded_ns, written_ns, was_paused = self.own[:, at].tolist()
        index = bisect_left(self.timelines[at].write_ns, written_ns)
        return Delivery(self._arrival(at), resumed_ns, encoded_ns, written_ns, bool(was_paused), index)

    def _arrival(self, at: int) -> Arrival:
        for arrival, count in self.arrivals:
            at -= count
            if at < 0:
                return arrival
        raise IndexError


def _table(values: Sequence[int], num_columns: int) -> Column:
    """Returns `(num_columns, num_rows)` of values that come row by row."""
    return np.ascontiguousarray(np.fromiter(values, np.int64, len(values)).reshape(-1, num_columns).T)


class WriteObserver(Observer):
    """An observer that gets writes together: after the steps that made their tokens, before ends of requests."""

    def on_writes(self, writes: Writes) -> None:
        """Takes the writes that returned since the last call."""


class Listeners(Generic[_What]):
    """Callbacks for one event. A callback that raises is dropped; the caller never fails."""

    def __init__(self) -> None:
        self._listeners: list[Callable[_What, None]] = []

    def append(self, listener: Callable[_What, None]) -> None:
        self._listeners.append(listener)

    def __call__(self, *arguments: _What.args, **named: _What.kwargs) -> None:
        for listener in self._listeners.copy():
            try:
                listener(*arguments, **named)
            except Exception:
                logger.exception("%r failed and is dropped; the other listeners go on", listener)
                self._listeners.remove(listener)


class Hub(WriteObserver):
    """The observer that passes facts on to all others.

    They hear at once that a request begins; of the facts that waited they get the steps, then the writes, all of them
    together, then the ends of requests.
    """

    def __init__(self, observers: Iterable[Observer], max_delay_s: float = 0.0, max_steps: int = MAX_STEPS) -> None:
        """With `max_delay_s`, facts wait so long at most; they must then come on an event loop."""
        self.spent_ns = 0  # by all observers
        self.entered_ns: dict[LifecycleState, int] = {}  # when each state of the newest start was entered
        self.on_step_read: Callable[[int], None] = lambda _: None  # called with the moment of its end, at once
        self.on_write_returned: Callable[[int], None] = lambda _: None  # called with the moment, at once
        self._max_delay_s = max_delay_s
        self._max_steps = max_steps
        self._observers = [(observer, _heard_by(observer)) for observer in observers]
        self._facts: _Facts = []  # steps, and writes one by one, that wait
        self._num_steps = 0  # of them
        self._timelines: list[RequestTimeline] = []  # of the writes that came one by one, that wait
        self._deliveries: list[Delivery] = []  # likewise
        self._writes: list[Writes] = []  # that came together, that wait
        self._ends: dict[str, RequestTimeline] = {}  # likewise, by request id
        self._timer: asyncio.TimerHandle | None = None
        self._find_who_hears_writes()

    def _find_who_hears_writes(self) -> None:
        heard = {name for _, listeners in self._observers for name in listeners}
        self._are_writes_heard, self._is_each_write_heard = "on_writes" in heard, "on_write" in heard

    def on_lifecycle(self, state: LifecycleState) -> None:
        self.catch_up()
        if state is LifecycleState.STARTING:
            self.entered_ns = {}
        self.entered_ns[state] = time.monotonic_ns()
        self._deliver([("on_lifecycle", (state,))])

    def on_start(self, timeline: RequestTimeline) -> None:
        if timeline.request_id in self._ends:  # the client uses its id again
            self.catch_up()
        self._deliver([("on_start", (timeline,))])

    def on_refusal(self, code: str) -> None:
        self._deliver([("on_refusal", (code,))])

    def on_step(self, record: StepRecord, advanced: Advanced) -> None:
        self.on_step_read(record.end_ns)
        self._facts.append(("on_step", (record, advanced)))
        self._num_steps += 1
        if not self._max_delay_s or self._num_steps >= self._max_steps:
            self.catch_up()
        else:
            self._catch_up_soon()

    def on_write(self, timeline: RequestTimeline, delivery: Delivery) -> None:
        self.on_write_returned(delivery.written_ns)
        if self._are_writes_heard:
            self._timelines.append(timeline)
            self._deliveries.append(delivery)
        if self._is_each_write_heard:
            self._facts.append(("on_write", (timeline, delivery)))
        if self._max_delay_s:
            self._catch_up_soon()

    def on_writes(self, writes: Writes) -> None:
        """Writes returned, in another process."""
        if self._are_writes_heard:
            self._writes.append(writes)
        if self._is_each_write_heard:
            self._facts += [
                ("on_write", (timeline, writes.delivery(at))) for at, timeline in enumerate(writes.timelines)
            ]
        if self._max_delay_s:
            self._catch_up_soon()

    def _catch_up_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._max_delay_s, self.catch_up)

    def on_finish(self, timeline: RequestTimeline) -> None:
        self._ends[timeline.request_id] = timeline
        if not self._max_delay_s or len(self._ends) >= MAX_ENDS or timeline.has_failed:
            self.catch_up()
        else:
            self._catch_up_soon()

    def on_stall(self, since_ns: int) -> None:
        self._deliver([("on_stall", (since_ns,))])

    def on_rest(self, violations: Sequence[Violation]) -> None:
        self.catch_up()
        self._deliver([("on_rest", (violations,))])

    def on_resume(self, timelines: Sequence[RequestTimeline]) -> None:
        self.catch_up()
        self._deliver([("on_resume", (timelines,))])

    def catch_up(self) -> None:
        """Delivers what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        facts, self._facts, self._num_steps = self._facts, [], 0
        if self._timelines:
            self._writes.append(Writes.of(self._timelines, self._deliveries))
            self._timelines, self._deliveries = [], []
        if self._writes:
            facts.append(("on_writes", (Writes.joined(self._writes),)))
            self._writes = []
        if self._ends:
            facts += [("on_finish", (timeline,)) for timeline in self._ends.values()]
            self._ends = {}
        if facts:
            self._deliver(facts)

    def _deliver(self, facts: _Facts) -> None:
        began_ns = time.monotonic_ns()
        for entry in self._observers.copy():
            observer, listeners = entry
            try:
                for name, fact in facts:
                    if name in listeners:
                        listeners[name](*fact)
            except Exception:
                logger.exception("observer %s failed and is dropped; the others go on", type(observer).__name__)
                self._observers.remove(entry)
                self._find_who_hears_writes()
        self.spent_ns += time.monotonic_ns() - began_ns


def _heard_by(observer: Observer) -> dict[str, Callable[..., None]]:
    """Returns the methods that the observer overrides; it gets nothing else, since there are many writes."""
    heard = {
        name: getattr(observer, name) for name in _FACTS if getattr(type(observer), name) is not getattr(Observer, name)
    }
    return heard | ({"on_writes": observer.on_writes} if isinstance(observer, WriteObserver) else {})
