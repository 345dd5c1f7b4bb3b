"""One fact in, the same fact to every observer that hears it; knows nothing of what they make of it.

An observer that raises is logged once, with its traceback, and hears nothing more: a fault in telemetry may cost
telemetry, never a request. This is the one place in `observe/` that catches everything.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from roseinfer.records import Delivery, LifecycleState, Observer, RequestTimeline, StepRecord

logger = logging.getLogger(__name__)

_Listener = tuple[Observer, Callable[..., None]]


class Hub(Observer):
    """The observer that stands for all others, told in the order in which they were given."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self.spent_ns = 0  # by all observers
        self._observers = list(observers)
        self._find_listeners()

    def _find_listeners(self) -> None:
        """Who hears what. An observer that leaves a method as `Observer` has it is not asked: there are many writes."""
        self._on_lifecycle = self._listeners("on_lifecycle")
        self._on_start = self._listeners("on_start")
        self._on_step = self._listeners("on_step")
        self._on_write = self._listeners("on_write")
        self._on_finish = self._listeners("on_finish")

    def _listeners(self, name: str) -> list[_Listener]:
        unheard = getattr(Observer, name)
        return [(each, getattr(each, name)) for each in self._observers if getattr(type(each), name) is not unheard]

    def on_lifecycle(self, state: LifecycleState) -> None:
        self._tell(self._on_lifecycle, state)

    def on_start(self, timeline: RequestTimeline) -> None:
        self._tell(self._on_start, timeline)

    def on_step(self, record: StepRecord, advanced: Sequence[RequestTimeline]) -> None:
        self._tell(self._on_step, record, advanced)

    def on_write(self, timeline: RequestTimeline, delivery: Delivery) -> None:
        self._tell(self._on_write, timeline, delivery)

    def on_finish(self, timeline: RequestTimeline) -> None:
        self._tell(self._on_finish, timeline)

    def _tell(self, listeners: list[_Listener], *facts: Any) -> None:
        began_ns = time.monotonic_ns()
        for observer, listener in listeners:
            try:
                listener(*facts)
            except Exception:
                logger.exception("observer %s failed and is dropped; the others go on", type(observer).__name__)
                self._observers = [each for each in self._observers if each is not observer]
                self._find_listeners()  # the loop goes on over the list as it was
        self.spent_ns += time.monotonic_ns() - began_ns
