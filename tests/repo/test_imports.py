"""The import contracts of pyproject.toml hold, and they cover every module."""

import subprocess
import sys
import tomllib
from pathlib import Path

from tests.repo.tree import ROOT, SOURCE


def test_the_import_contracts_hold() -> None:
    """In a process of its own, since the linter configures logging and so silences every logger that exists."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_every_root_module_has_its_layer() -> None:
    """A new file beside `wiring.py`, or a new folder, has a place in the order of imports."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    placed = {name.strip().removeprefix("roseinfer.").split(".")[0] for layer in layers for name in layer.split("|")}
    modules = {path.stem for path in SOURCE.glob("*.py") if not path.stem.startswith("__")}
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert placed == modules | packages
