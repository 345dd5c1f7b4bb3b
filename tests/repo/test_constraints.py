"""What is imported is declared in pyproject.toml; what is declared is pinned in constraints.txt, within its bounds."""

import ast
import importlib.metadata
import sys
import tomllib
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.repo.tree import ROOT, SOURCE, python_files, tree_of

OF_CLIENTS = (
    ROOT / "tests" / "e2e" / "python_sdks.py"
)  # in an environment of its own, of the requirements.txt beside it


def pins(file: str = "constraints.txt") -> list[Requirement]:
    lines = (ROOT / file).read_text().splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def declared(*extras: str) -> list[Requirement]:
    """The requirements of the project and of the named extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [text for extra in extras for text in project["optional-dependencies"][extra]]
    return [Requirement(text) for text in project["dependencies"] + texts]


BY_ENTRY_POINT = {"opentelemetry-exporter-otlp-proto-http"}  # observe/otel.py asks for it by the name it gives itself


def imported_packages(folder: Path, declared_names: AbstractSet[str]) -> set[str]:
    """Canonical names of the distributions whose modules the folder's files import, wherever in a file.

    Of those that share a namespace, such as `opentelemetry`, that which has the module; of several that have it, one
    that is declared is taken for all.
    """
    owners = importlib.metadata.packages_distributions()
    modules = set()
    for path in set(python_files(folder)) - {OF_CLIENTS}:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(str(node.module))
    neighbours = {path.stem for path in (ROOT / "tools").iterdir()} | {"roseinfer", "tests", "benchmarks"}
    known = neighbours | set(sys.stdlib_module_names)
    foreign = {module: module.partition(".")[0] for module in modules if module.partition(".")[0] not in known}
    found = set[str]()
    for module, top in foreign.items():
        names = {canonicalize_name(owner) for owner in owners.get(top, [top])}
        if len(names) > 1:
            names = {name for name in names if has_module(name, module)} or names
        found.add(min(names & declared_names or names))
    return found


@cache
def has_module(distribution: str, module: str) -> bool:
    prefix = module.replace(".", "/")
    files = importlib.metadata.distribution(distribution).files or []
    return any(str(file).startswith((f"{prefix}/", f"{prefix}.")) for file in files)


def test_every_import_is_declared() -> None:
    """What another package happens to bring may be gone tomorrow."""
    needed = {
        canonicalize_name(wanted.name) for wanted in declared("cuda", "flashinfer", "kv-events", "plot", "ray", "s3")
    }
    for_tests = {canonicalize_name(wanted.name) for wanted in declared("test", "dev", "ray")}
    assert imported_packages(SOURCE, needed) - needed == set()
    for_tests |= {canonicalize_name(pin.name) for pin in pins("tests/chart/requirements.txt")}  # Helm's own environment
    tooling = imported_packages(ROOT / "tools", for_tests) | imported_packages(ROOT / "tests", for_tests)
    assert tooling <= for_tests
    for_load = needed | {canonicalize_name(wanted.name) for wanted in declared("loadtest")}
    assert imported_packages(ROOT / "loadtest", for_load) <= for_load
    assert for_load <= needed | for_tests, "the tests run it"


def test_what_serving_installs_is_imported() -> None:
    """A dependency that no source imports is no dependency."""
    needed = {canonicalize_name(wanted.name) for wanted in declared()}
    assert needed - imported_packages(SOURCE, needed) - BY_ENTRY_POINT == set()


def test_every_declared_package_is_pinned_within_its_bounds() -> None:
    everything = declared("test", "dev", "loadtest", "plot", "ray")
    versions = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins()}
    unpinned = [wanted.name for wanted in everything if canonicalize_name(wanted.name) not in versions]
    outside = [
        f"{wanted} is pinned to {version}"
        for wanted in everything
        if (version := versions.get(canonicalize_name(wanted.name))) and not wanted.specifier.contains(version)
    ]
    assert unpinned + outside == []


def test_pins_are_exact_portable_and_sorted() -> None:
    specifiers = [next(iter(pin.specifier)) for pin in pins()]
    assert all(len(pin.specifier) == 1 and pin.url is None for pin in pins())
    assert all(specifier.operator == "==" and "+" not in specifier.version for specifier in specifiers)
    names = [canonicalize_name(pin.name) for pin in pins()]
    assert names == sorted(set(names))
