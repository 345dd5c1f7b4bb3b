"""`make audit`: a bill of what is installed, the licences in it, and whether anything is known to be weak."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

import audit
from pin_constraints import closure
from tests.conftest import require_path, requires_all
from tests.repo.test_constraints import declared, pins
from tests.repo.tree import ROOT

TOOLS = ROOT / "build" / "audit-venv"

# What a server is made of may be used, changed and passed on by anybody; another licence is a decision to take.
PERMISSIVE = (
    "apache",
    "mit",
    "bsd",
    "isc",
    "psf",
    "python-2.0",
    "zlib",
    "unlicense",
    "0bsd",
    "hpnd",
    "cnri",
    "mpl-2.0",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run wrote."""
    require_path(TOOLS / "bin" / "cyclonedx-py", "make audit")
    out = tmp_path_factory.mktemp("audit")
    audit.bill_of_materials(TOOLS / "bin" / "cyclonedx-py", out / "sbom.json")
    return out


def test_the_bill_is_of_the_tested_versions_and_says_what_a_server_needs(folder: Path) -> None:
    bill = json.loads((folder / "sbom.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == "roseinfer"
    components = {canonicalize_name(component["name"]): component for component in bill["components"]}
    tested = {canonicalize_name(pin.name) for pin in pins()}
    if not requires_all():  # Ray and what it brings may be missing
        tested = {canonicalize_name(name) for name in closure(declared("test", "dev"))}
    assert tested - {"pip", "setuptools"} <= components.keys()
    needed = {name for name, component in components.items() if component["scope"] == "required"}
    assert {canonicalize_name(wanted.name) for wanted in declared()} <= needed
    assert not needed & {"pytest", "mypy", "hypothesis", "locust"}
    assert str(ROOT) not in (folder / "sbom.json").read_text(), "it does not say where it was built"


def test_every_package_of_a_server_has_a_permissive_licence(folder: Path) -> None:
    components = json.loads((folder / "sbom.json").read_text())["components"]
    licences = {
        component["name"]: audit.licence_of(component) for component in components if component["scope"] == "required"
    }
    assert {
        name: licence for name, licence in licences.items() if not any(word in licence.lower() for word in PERMISSIVE)
    } == {}
    table = audit.licences(components).splitlines()
    assert len(table) == 2 + len(components)


def answer(*packages: Mapping[str, object]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


UNKNOWN = {"name": "torch", "skip_reason": "not found"}
SOUND = {"name": "aiohttp", "version": "3.14.5", "vulns": []}
WEAK = {"name": "jinja2", "version": "2.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3.0"]}]}


@pytest.mark.parametrize("unanswered", ["", "no JSON", "[]", "null", answer(), answer(UNKNOWN)])
def test_an_index_without_advisories_is_no_clean_bill(unanswered: str) -> None:
    assert audit.read_advisories(unanswered) == (0, audit.NO_ADVISORIES)


def test_weak_packages_are_named_and_so_are_unknown_ones() -> None:
    assert audit.read_advisories(answer(SOUND)) == (0, "advisories: 0 of 1 packages have a known weakness")
    num_weak, told = audit.read_advisories(answer(SOUND, WEAK, UNKNOWN))
    assert num_weak == 1
    assert "jinja2 2.0: PYSEC-1, fixed in 3.0" in told
    assert "1 of 2 packages" in told
    assert "no entry for torch" in told


def test_exactly_the_installed_versions_are_asked_about(tmp_path: Path) -> None:
    """A program in pip-audit's place says what it was asked."""
    program = "import json, sys; print(json.dumps(open(sys.argv[sys.argv.index('--requirement') + 1]).read()))"
    components = [{"name": "torch", "version": "2.13.0+cpu"}, {"name": "aiohttp", "version": "3.14.5"}]
    asked = audit.ask_for_advisories([sys.executable, "-c", program], components, tmp_path)
    assert json.loads(asked) == "aiohttp==3.14.5\ntorch==2.13.0\n"


def test_the_programs_have_exact_versions() -> None:
    programs = pins("tools/audit_requirements.txt")
    assert {"cyclonedx-bom", "pip-audit"} <= {canonicalize_name(pin.name) for pin in programs}
    assert all(str(pin.specifier).startswith("==") for pin in programs)
