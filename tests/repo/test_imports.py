"""The import contracts of pyproject.toml hold, and they cover every module."""

import tomllib

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

from tests.repo.tree import ROOT, SOURCE


def test_the_import_contracts_hold() -> None:
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == EXIT_STATUS_SUCCESS


def test_every_root_module_has_its_layer() -> None:
    """A new file beside `cli.py` has a place in the order, so that nobody can import it from below."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    placed = {name.strip().removeprefix("roseinfer.") for layer in layers for name in layer.split("|")}
    modules = {path.stem for path in SOURCE.glob("*.py") if not path.stem.startswith("__")}
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert placed == modules | packages
