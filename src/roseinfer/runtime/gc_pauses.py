"""Measures the garbage collections of this interpreter."""

import gc
import time
from collections import deque
from collections.abc import Callable
from typing import Self

_MAX_PAUSES = 1 << 16  # beyond it, the oldest that were not taken are dropped


class GcPauses:
    """Measures each collection while it is open; during a collection nothing else of this interpreter runs.

    A collection may come in any thread, at any allocation, so noting one takes no lock, and a listener may take none
    either; it is called with the start and the end of each collection.
    """

    def __init__(
        self,
        clock: Callable[[], int] = time.monotonic_ns,
        on_start: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_start` and `on_end` are called around each collection, in the thread that it stops."""
        self.listeners: list[Callable[[int, int], None]] = []
        self._clock = clock
        self._on_start = on_start
        self._on_end = on_end
        self._start_ns: int | None = None  # of the collection under way
        self._pauses_ns: deque[int] = deque(maxlen=_MAX_PAUSES)

    def __enter__(self) -> Self:
        gc.callbacks.append(self._on_collection)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._on_start()
            self._start_ns = self._clock()
        elif self._start_ns is not None:
            start_ns, end_ns = self._start_ns, self._clock()
            self._start_ns = None
            self._pauses_ns.append(end_ns - start_ns)
            try:
                for listener in self.listeners:
                    listener(start_ns, end_ns)
            except RecursionError:  # collected at the bottom of deep recursion: listeners miss this pause
                pass
            finally:
                self._on_end()

    def take(self) -> list[int]:
        """Nanoseconds of each collection that ended since the last `take`."""
        taken: list[int] = []
        while self._pauses_ns:
            taken.append(self._pauses_ns.popleft())
        return taken
