"""Puts stand-ins in the place of modules that others import at start and that nothing of an engine uses.

A stand-in gives what marks functions, and imports the module itself when more is asked of it.
"""

import importlib
import sys
from collections.abc import Collection
from types import ModuleType
from typing import Any


class StandIn(ModuleType):
    """Stands for a module until something else than its marks is asked of it."""

    def __init__(self, name: str, marks: Collection[str]) -> None:
        super().__init__(name)
        self.__path__ = []  # as a package has
        self._marks = marks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._marks:
            return _unmarked
        forget_stand_ins()
        return getattr(importlib.import_module(self.__name__), name)


def stand_in(*names: str, marks: Collection[str] = ()) -> None:
    """Have imports of these modules, unless they are there, get stand-ins until `forget_stand_ins`.

    `marks` are functions and classes of theirs that change nothing for us: they return what they are given.
    """
    for name in names:
        sys.modules.setdefault(name, StandIn(name, marks))


def forget_stand_ins() -> None:
    """From now on imports get the modules themselves. What holds a stand-in keeps it."""
    for name in [name for name, module in sys.modules.items() if isinstance(module, StandIn)]:
        del sys.modules[name]


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    return _unmarked if function is None else function
