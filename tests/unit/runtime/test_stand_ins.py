"""Modules that are imported only when more is asked of them than marks."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from roseinfer.runtime.stand_ins import StandIn, forget_stand_ins, stand_in


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that can be imported, and is not yet."""
    (tmp_path / "costly_module.py").write_text("VALUE = 7\ndef mark(function): return None\n", encoding="ascii")
    monkeypatch.syspath_prepend(tmp_path)
    yield "costly_module"
    sys.modules.pop("costly_module", None)


def test_marks_come_without_the_module(name: str) -> None:
    stand_in(name, marks={"mark"})
    module = importlib.import_module(name)
    assert module.mark(len) is len
    assert module.mark(reason="compiled")(len) is len
    assert isinstance(sys.modules[name], StandIn)


def test_anything_else_imports_the_module(name: str) -> None:
    stand_in(name, marks={"mark"})
    assert importlib.import_module(name).VALUE == 7
    assert sys.modules[name].mark(len) is None


def test_when_it_is_forgotten_the_module_is_imported(name: str) -> None:
    stand_in(name)
    forget_stand_ins()
    assert name not in sys.modules
    assert "VALUE" in vars(importlib.import_module(name))


def test_a_module_that_is_there_stays() -> None:
    stand_in("pytest", marks={"fixture"})
    assert sys.modules["pytest"] is pytest
