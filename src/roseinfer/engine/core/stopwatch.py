"""Stopwatches for the parts of an engine step, which also mark ranges for an attached profiler."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, Self

from roseinfer.records import PhaseTimes


class RangeMarker(Protocol):
    """Marks the start and the end of a named range for an attached profiler."""

    def push(self, name: str, payload: int) -> None: ...

    def pop(self) -> None: ...


_NOTHING = nullcontext()
_CAPTURE = "capture"
_ZEROS = dict.fromkeys(PhaseTimes.__struct_fields__, 0)


def unwatched(_name: str) -> AbstractContextManager[None]:
    """A watch that measures nothing."""
    return _NOTHING


def _ignore(_: bool) -> None: ...


class Phases:
    """Makes the stopwatch of each step. One instance serves one engine; with a marker it also opens ranges."""

    def __init__(self, marker: RangeMarker | None = None, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock = clock
        self.marker = marker
        self.on_capture: Callable[[bool], None] = _ignore  # called when a CUDA graph's recording begins, and ends
        self._step_id = 0  # of the range that `whole` opened last

    def begin(self, step_id: int) -> "Stopwatch":
        if self.marker is None:
            return Stopwatch(step_id, self.clock, self.on_capture)
        return _RangedStopwatch(step_id, self.clock, self.on_capture, self.marker)

    def whole(self, step_id: int) -> AbstractContextManager[None]:
        """A range around all that the engine does until it outputs this step; it measures nothing."""
        if self.marker is None:
            return _NOTHING
        self._step_id = step_id
        return _range(self.marker, "step", step_id)

    def begin_collection(self) -> None:
        """Open a range for a garbage collection."""
        if self.marker is not None:
            self.marker.push("gc", self._step_id)

    def end_collection(self) -> None:
        if self.marker is not None:
            self.marker.pop()


@contextmanager
def _range(marker: RangeMarker, name: str, payload: int) -> Iterator[None]:
    marker.push(name, payload)
    try:
        yield
    finally:
        marker.pop()


class Stopwatch:
    """One step's times: `with watch("launch"):` adds its nanoseconds.

    The names are the fields of `PhaseTimes`. Each step pays for this some seven times over: hence a class and no
    generator, named arguments of `__exit__`, which are not gathered into a tuple, and no look at what is rarely there.
    """

    __slots__ = ("_clock", "_elapsed", "_on_capture", "_open", "start_ns", "step_id")

    def __init__(self, step_id: int, clock: Callable[[], int], on_capture: Callable[[bool], None] = _ignore) -> None:
        self.step_id = step_id
        self.start_ns = clock()
        self._clock = clock
        self._on_capture = on_capture
        self._elapsed = _ZEROS.copy()
        self._open: list[tuple[str, int]] = []  # phases begun and not ended, and when

    def __call__(self, name: str) -> Self:
        """The phase begins here; the `with` that follows ends it."""
        if name == _CAPTURE:
            self._on_capture(True)
        self._open.append((name, self._clock()))
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        name, begin_ns = self._open.pop()
        self._elapsed[name] += self._clock() - begin_ns
        if name == _CAPTURE:
            self._on_capture(False)

    def times(self) -> PhaseTimes:
        return PhaseTimes(*self._elapsed.values())


class _RangedStopwatch(Stopwatch):
    """One that opens a range for each phase as well."""

    __slots__ = ("_marker",)

    def __init__(
        self, step_id: int, clock: Callable[[], int], on_capture: Callable[[bool], None], marker: RangeMarker
    ) -> None:
        super().__init__(step_id, clock, on_capture)
        self._marker = marker

    def __call__(self, name: str) -> Self:
        self._marker.push(name, self.step_id)
        return super().__call__(name)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        super().__exit__(kind, error, traceback)
        self._marker.pop()
