"""A profile of the next steps: starts a profiler, counts steps, stops it. Knows not what a profiler records."""

from pathlib import Path
from typing import Protocol

from roseinfer.messages import Profile, ProfileEnded
from roseinfer.records import StepRecord


class Profiler(Protocol):
    """Whoever records what host and device do; in production `model/profiling.py`. Raises OSError or RuntimeError."""

    def start(self) -> None:
        """Record from now on."""

    def stop(self, directory: Path) -> None:
        """Record no more, and write what there is."""


class StepProfile:
    """At most one profile at a time. A profiler that fails costs the profile and nothing else."""

    def __init__(self, profiler: Profiler | None) -> None:
        self._profiler = profiler
        self._wanted = Profile(0, "")
        self._num_left = 0
        self._has_stopped = False  # since the last step was marked

    @property
    def is_active(self) -> bool:
        return self._num_left > 0

    def begin(self, wanted: Profile) -> ProfileEnded | None:
        """Start; the answer if that fails."""
        if self._profiler is None:
            return ProfileEnded(0, "This engine has no profiler.")
        if self.is_active:
            return ProfileEnded(0, "A profile is being recorded already.")
        try:
            self._profiler.start()
        except (OSError, RuntimeError) as error:
            return ProfileEnded(0, _told(error))
        self._wanted, self._num_left = wanted, wanted.num_steps
        return None

    def marks_step(self) -> bool:
        """Whether a profiler slowed the step that is being told: by recording it, or by stopping just before it."""
        marks = self.is_active or self._has_stopped
        self._has_stopped = False
        return marks

    def count(self, record: StepRecord) -> ProfileEnded | None:
        """One more step was recorded; the answer if it was the last. A step in which nothing ran does not count."""
        self._num_left -= record.kind != "idle"
        if self.is_active:
            return None
        assert self._profiler is not None, "no profile begins without one"
        self._has_stopped = True
        try:
            self._profiler.stop(Path(self._wanted.directory))
        except (OSError, RuntimeError) as error:
            return ProfileEnded(self._wanted.num_steps, _told(error))
        return ProfileEnded(self._wanted.num_steps)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
