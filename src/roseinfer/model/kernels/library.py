"""Loads a built shared object, whose functions Python calls. It never compiles.

The object's OpenMP symbols resolve to the runtime that torch has loaded, so kernels and torch share one pool of
threads: import torch first. A call releases the GIL.
"""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roseinfer.config.tree import RunnerConfig
from roseinfer.errors import ConfigError
from roseinfer.model.kernels.levels import LEVELS, Level, find_built, kernels_directory, levels_here

_MAPS = Path("/proc/self/maps")
_OPENMP = re.compile(r"/\S*/lib(?:g|i)?omp\d*(?:-\w+)?\.so\S*")


class Kernels:
    """The functions of one shared object, as `extern "C"` declares them."""

    def __init__(self, level: str, path: Path) -> None:
        """Raises OSError when the object cannot be loaded, or the system refuses the level's instructions."""
        for runtime in openmp_runtimes():
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)  # loaded already; this makes its symbols visible to others
        self.level = level
        self._library = ctypes.CDLL(str(path))
        if self._library.roseinfer_init():
            raise OSError(f"the system does not let this process use {level}")

    def has(self, name: str) -> bool:
        """Whether there is a function of this name at this level."""
        return hasattr(self._library, name)

    def function(self, name: str, *argtypes: Any) -> Callable[..., None]:
        """The function `name`, which returns nothing and takes arguments of these ctypes types."""
        function = self._library[name]
        function.argtypes = argtypes
        function.restype = None
        return function


def openmp_runtimes() -> list[str]:
    """The files of the OpenMP runtimes that this process has loaded: one, after torch is imported."""
    try:
        return sorted(set(_OPENMP.findall(_MAPS.read_text(encoding="utf-8"))))
    except OSError:
        return []


def load_kernels(config: RunnerConfig) -> Kernels | None:
    """The configured kernels, or None if they are off or `auto` finds none built. Import torch first.

    Raises ConfigError for a level that the configuration names and that cannot be used.
    """
    if config.kernels == "off":
        return None
    kernels_dir = kernels_directory(config.kernels_dir)
    if config.kernels != "auto":
        return _load_named(LEVELS[config.kernels], kernels_dir)
    for level in reversed(levels_here()):
        path = find_built(level, kernels_dir)
        if path is not None:
            try:
                return Kernels(level.name, path)
            except OSError:  # built elsewhere for another system; a lower level may do
                continue
    return None


def _load_named(level: Level, kernels_dir: Path) -> Kernels:
    if level not in levels_here():
        raise ConfigError(f"This processor does not have all instructions of {level.name}.", param="runner.kernels")
    path = find_built(level, kernels_dir)
    if path is None:
        raise ConfigError(
            f"No {level.name} kernels are built in {kernels_dir}: run `roseinfer kernels build --level {level.name}`.",
            param="runner.kernels",
        )
    try:
        return Kernels(level.name, path)
    except OSError as error:
        raise ConfigError(f"The {level.name} kernels do not load: {error}.", param="runner.kernels") from None
