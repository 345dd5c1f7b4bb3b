"""One fact in, the same fact to every observer; knows nothing of what they make of it.

An observer that raises is logged once, with its traceback, and hears nothing more: a fault in telemetry may cost
telemetry, never a request. This is the one place in `observe/` that catches everything.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

from roseinfer.records import Delivery, LifecycleState, Observer, RequestTimeline, StepRecord

logger = logging.getLogger(__name__)


class Hub:
    """The observer that stands for all others, told in the order in which they were given."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = list(observers)

    def on_lifecycle(self, state: LifecycleState) -> None:
        self._tell(lambda observer: observer.on_lifecycle(state))

    def on_start(self, timeline: RequestTimeline) -> None:
        self._tell(lambda observer: observer.on_start(timeline))

    def on_step(self, record: StepRecord, advanced: Sequence[RequestTimeline]) -> None:
        self._tell(lambda observer: observer.on_step(record, advanced))

    def on_write(self, timeline: RequestTimeline, delivery: Delivery) -> None:
        self._tell(lambda observer: observer.on_write(timeline, delivery))

    def on_finish(self, timeline: RequestTimeline) -> None:
        self._tell(lambda observer: observer.on_finish(timeline))

    def _tell(self, fact: Callable[[Observer], None]) -> None:
        for observer in tuple(self._observers):
            try:
                fact(observer)
            except Exception:
                self._observers.remove(observer)
                logger.exception("observer %s failed and is dropped; the others go on", type(observer).__name__)
