"""Marks an engine's steps, their parts and garbage collections as ranges for an attached profiler."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, Self

from roseinfer.engine.core.stopwatch import Phases, Stopwatch


class RangeMarker(Protocol):
    """Marks the start and the end of a named range for an attached profiler."""

    def push(self, name: str, payload: int) -> None: ...

    def pop(self) -> None: ...


def make_phases(marker: RangeMarker | None) -> Phases:
    """Phases that mark ranges too, if there is a marker."""
    return Phases() if marker is None else _RangedPhases(marker)


class _RangedPhases(Phases):
    def __init__(self, marker: RangeMarker) -> None:
        super().__init__()
        self._marker = marker
        self._step_id = 0  # of the range that `whole` opened last

    def begin(self, step_id: int) -> Stopwatch:
        return _RangedStopwatch(step_id, self.clock, self.on_capture, self._marker)

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        self._marker.push(name, self._step_id)
        try:
            yield
        finally:
            self._marker.pop()

    def whole(self, step_id: int) -> AbstractContextManager[None]:
        self._step_id = step_id
        return self._range("step")

    def begin_collection(self) -> None:
        self._marker.push("gc", self._step_id)

    def end_collection(self) -> None:
        self._marker.pop()


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
