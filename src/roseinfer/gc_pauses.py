"""Garbage collections of this interpreter into the time that each took. Knows nobody who wants to hear of it."""

import gc
import time
from collections import deque
from collections.abc import Callable
from typing import Self

_MAX_PAUSES = 1 << 16  # beyond so many that nobody has taken, the oldest are forgotten


class GcPauses:
    """Notes each collection while it is open; during one, nothing else of this interpreter runs.

    Collections come in any thread and at any allocation, so noting one takes no lock.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.total_ns = 0
        self._clock = clock
        self._start_ns: int | None = None  # of the collection under way
        self._pauses_ns: deque[int] = deque(maxlen=_MAX_PAUSES)

    def __enter__(self) -> Self:
        gc.callbacks.append(self._on_collection)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._start_ns = self._clock()
        elif self._start_ns is not None:
            pause_ns = self._clock() - self._start_ns
            self.total_ns += pause_ns
            self._pauses_ns.append(pause_ns)
            self._start_ns = None

    def take(self) -> list[int]:
        """Nanoseconds of each collection that ended since the last `take`."""
        taken: list[int] = []
        while self._pauses_ns:
            taken.append(self._pauses_ns.popleft())
        return taken
