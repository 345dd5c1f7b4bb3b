"""Gives each fact to every observer that hears it; drops an observer that raises, so that no request fails for it.

Steps, writes and ends of requests wait a little, and observers get several of each: an engine on the same processor
leaves nothing in its caches, so each delivery pays for fetching all the code and data that observers touch. What waits
is delivered before an observer is asked, before the server's state changes, and when a request fails.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, ParamSpec

import numpy as np
import numpy.typing as npt

from roseinfer.records import (
    Advanced,
    Arrival,
    Delivery,
    FinishReason,
    LifecycleState,
    Observer,
    RequestTimeline,
    StepRecord,
    Violation,
)

logger = logging.getLogger(__name__)

MAX_DELAY_S = 0.2
MAX_STEPS = 8  # that wait: delivering so many keeps the event loop for about a millisecond
MAX_ENDS = 16  # that wait, for the same reason

_FACTS = (
    *("on_lifecycle", "on_start", "on_refusal", "on_step", "on_write", "on_finish"),
    *("on_stall", "on_rest", "on_resume"),
)
_FAULTS = frozenset({FinishReason.ERROR, FinishReason.TIMEOUT})
_Facts = list[tuple[str, tuple[Any, ...]]]
_What = ParamSpec("_What")

_OWN = ("serial", "start_ns", "resumed_ns", "encoded_ns", "written_ns", "was_paused")
_OF_ARRIVALS = ("tokens_ns", "sent_ns", "read_ns", "was_delayed")
COLUMNS = (*_OWN, *_OF_ARRIVALS)
"""`serial` is the request's, `start_ns` when its write before this one returned, 0 for the first. `was_delayed` is
1 if a collection, the lack of a core or a full outbox delayed the tokens on their way to the front end."""

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
        """Adds a write whose stamp the timeline already holds. Call it before `columns`."""
        self.timelines.append(timeline)
        self.deliveries.append(delivery)

    def columns(self) -> dict[str, Column]:
        """Returns each of COLUMNS, `(num_writes,)`; made once, and not while a write waits to return."""
        if not self._columns:
            self._columns = self._own() | self._of_arrivals()
        return self._columns

    def _own(self) -> dict[str, Column]:
        """Returns what each write has for itself. By way of a list: an `array` takes values three times as slowly."""
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
        """Returns what all writes with the tokens of one step share; they mostly come one after the other."""
        values, counts = list[int](), list[int]()
        last: Arrival | None = None
        for delivery in self.deliveries:
            if delivery.arrival is last:
                counts[-1] += 1
                continue
            last = delivery.arrival
            counts.append(1)
            values.extend((last.tokens_ns, last.sent_ns, last.read_ns, bool(last.delayed_ns or last.was_held)))
        return {name: column.repeat(counts) for name, column in _columns(_OF_ARRIVALS, values).items()}


def _columns(names: tuple[str, ...], values: list[int]) -> dict[str, Column]:
    table = np.fromiter(values, np.int64, len(values)).reshape(-1, len(names))
    return dict(zip(names, np.ascontiguousarray(table.T), strict=True))


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


class Hub(Observer):
    """The observer that passes facts on to all others.

    They hear at once that a request begins; of the facts that waited they get the steps, then the writes, all of them
    together, then the ends of requests.
    """

    def __init__(self, observers: Iterable[Observer], max_delay_s: float = 0.0) -> None:
        """With `max_delay_s`, facts wait so long at most; they must then come on an event loop."""
        self.spent_ns = 0  # by all observers
        self.on_step_read: Callable[[int], None] = lambda _: None  # called with the moment of its end, at once
        self.on_write_returned: Callable[[int], None] = lambda _: None  # called with the moment, at once
        self._max_delay_s = max_delay_s
        self._observers = [(observer, _heard_by(observer)) for observer in observers]
        self._facts: _Facts = []  # steps, and writes one by one, that wait
        self._num_steps = 0  # of them
        self._writes = Writes()  # likewise
        self._ends: dict[str, RequestTimeline] = {}  # likewise, by request id
        self._timer: asyncio.TimerHandle | None = None
        self._find_who_hears_writes()

    def _find_who_hears_writes(self) -> None:
        heard = {name for _, listeners in self._observers for name in listeners}
        self._are_writes_heard, self._is_each_write_heard = "on_writes" in heard, "on_write" in heard

    def on_lifecycle(self, state: LifecycleState) -> None:
        self.catch_up()
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
        if not self._max_delay_s or self._num_steps >= MAX_STEPS:
            self.catch_up()
        else:
            self._catch_up_soon()

    def on_write(self, timeline: RequestTimeline, delivery: Delivery) -> None:
        self.on_write_returned(delivery.written_ns)
        if self._are_writes_heard:
            self._writes.add(timeline, delivery)
        if self._is_each_write_heard:
            self._facts.append(("on_write", (timeline, delivery)))
        if self._max_delay_s:
            self._catch_up_soon()

    def _catch_up_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._max_delay_s, self.catch_up)

    def on_finish(self, timeline: RequestTimeline) -> None:
        self._ends[timeline.request_id] = timeline
        if not self._max_delay_s or len(self._ends) >= MAX_ENDS or timeline.finish_reason in _FAULTS:
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
        if self._writes:
            facts.append(("on_writes", (self._writes,)))
            self._writes = Writes()
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
