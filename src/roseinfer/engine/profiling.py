"""Profiles the next steps: starts the engine's profiler, counts steps, and stops it."""

from pathlib import Path

from roseinfer.engine.core.engine import Profiler
from roseinfer.messages import Profile, ProfileEnded
from roseinfer.records import StepRecord


class StepProfile:
    """At most one profile at a time. A profiler that fails ends the profile and affects nothing else."""

    def __init__(self, profiler: Profiler | None) -> None:
        self._profiler = profiler
        self._wanted = Profile(0, "")
        self._num_left = 0
        self._has_stopped = False  # since the last step was marked

    @property
    def is_active(self) -> bool:
        return self._num_left > 0

    def begin(self, wanted: Profile) -> ProfileEnded | None:
        """Start the profiler; returns the answer if that fails."""
        if self._profiler is None:
            return ProfileEnded(0, "This engine has no profiler.")
        if self.is_active:
            return ProfileEnded(0, "A profile is being recorded already.")
        try:
            self._profiler.start()
        except (OSError, RuntimeError) as error:
            return ProfileEnded(0, f"{type(error).__name__}: {error}")
        self._wanted, self._num_left = wanted, wanted.num_steps
        return None

    def marks_step(self) -> bool:
        """Whether the profiler slows the next step to be output: by recording it, or by having stopped before it."""
        marks = self.is_active or self._has_stopped
        self._has_stopped = False
        return marks

    def count_step(self, record: StepRecord) -> ProfileEnded | None:
        """Count a recorded step; stops after the last one and returns the answer. Idle steps do not count."""
        self._num_left -= record.kind != "idle"
        if self.is_active:
            return None
        assert self._profiler is not None, "no profile begins without one"
        self._has_stopped = True
        try:
            self._profiler.stop(Path(self._wanted.directory))
        except (OSError, RuntimeError) as error:
            return ProfileEnded(self._wanted.num_steps, f"{type(error).__name__}: {error}")
        return ProfileEnded(self._wanted.num_steps)
