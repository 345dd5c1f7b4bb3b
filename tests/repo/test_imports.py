"""The import contracts of pyproject.toml hold, and they cover every module."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.repo.tree import ROOT, SOURCE, tree_of


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


MAX_CORE_LINES = 2200
CORE_IMPORTS = {"config", "messages", "records", "engine.core"}
CORE_LIBRARIES = {"numpy", "msgspec"}


def test_the_core_of_the_engine_is_read_in_an_afternoon() -> None:
    """It is short, and imports nothing of the package but its vocabulary."""
    files = sorted((SOURCE / "engine" / "core").glob("*.py"))
    assert sum(len(path.read_text().splitlines()) for path in files) < MAX_CORE_LINES
    for path in files:
        for node in ast.walk(tree_of(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                own = name.removeprefix("roseinfer.")
                is_own = own != name and any(own == each or own.startswith(f"{each}.") for each in CORE_IMPORTS)
                library = name.partition(".")[0]
                assert is_own or library in CORE_LIBRARIES | sys.stdlib_module_names, f"{path.name} imports {name}"
