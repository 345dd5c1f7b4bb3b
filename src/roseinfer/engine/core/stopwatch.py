"""Stopwatches for the parts of an engine step."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Self

from roseinfer.records import PhaseTimes

_NOTHING = nullcontext()
_CAPTURE = "capture"
_ZEROS = dict.fromkeys(PhaseTimes.__struct_fields__, 0)


def unwatched(_name: str) -> AbstractContextManager[None]:
    """A watch that measures nothing."""
    return _NOTHING


def _ignore(_: bool) -> None: ...


class Phases:
    """Makes the stopwatch of each step; one instance serves one engine. `engine/ranges.py` marks ranges as well."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock = clock
        self.on_capture: Callable[[bool], None] = _ignore  # called when a CUDA graph's recording begins, and ends

    def begin(self, step_id: int) -> "Stopwatch":
        return Stopwatch(step_id, self.clock, self.on_capture)

    def whole(self, step_id: int) -> AbstractContextManager[None]:  # noqa: ARG002
        """Around all that the engine does until it outputs this step; it measures nothing."""
        return _NOTHING

    def begin_collection(self) -> None: ...

    def end_collection(self) -> None: ...


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
