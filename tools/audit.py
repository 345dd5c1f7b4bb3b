"""Writes a bill of materials and a list of licences of this environment, and asks for known weaknesses.

    python tools/audit.py [--tools build/audit-venv] [--out build/audit]

Writes `sbom.json` (CycloneDX; scope `required` is what a server needs, `excluded` what tests and development do) and
`licences.md`, and asks the package index for advisories. Exit status 1: a package has a known weakness. An index that
has no advisories ends the search with one sentence, and is no failure. CycloneDX's and PyPA's programs do the work, in
an environment of their own, so that they are no part of what they describe.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from pin_constraints import ROOT, closure

TIMEOUT_S = 15  # of one question to the package index
NO_ADVISORIES = (
    "advisories: skipped, for the package index that can be reached from here offers no advisory data; "
    "run `make audit` where PyPI answers."
)


def bill_of_materials(program: Path, file: Path) -> dict[str, Any]:
    """The bill of this interpreter's environment, with scopes and without paths; it is in the file then too."""
    command = [str(program), "environment", "--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "application"]
    file.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([*command, "--of", "JSON", "-o", str(file), sys.executable], check=True)  # noqa: S603 - named above
    bill: dict[str, Any] = json.loads(file.read_text())
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = closure(Requirement(text) for text in dependencies)
    # The bill is of the project itself, whose entry would name the folder that it was installed from.
    bill["components"] = [component for component in bill["components"] if component["name"] != "roseinfer"]
    for component in bill["components"]:
        component["scope"] = "required" if canonicalize_name(component["name"]) in needed else "excluded"
    file.write_text(json.dumps(bill, indent=1, ensure_ascii=False) + "\n")
    return bill


def licence_of(component: dict[str, Any]) -> str:
    """What the bill knows, else what the package says in words, else what its licence file begins with."""
    names = [
        entry.get("expression") or entry["license"].get("id") or entry["license"]["name"]
        for entry in component.get("licenses", ())
    ]
    if names:
        return ", ".join(dict.fromkeys(names))
    distribution = importlib.metadata.distribution(component["name"])
    if said := distribution.metadata.json.get("license"):
        return str(said).splitlines()[0]
    texts = [file for file in distribution.files or () if file.name.upper().startswith(("LICENSE", "COPYING"))]
    lines = [line.strip() for file in texts for line in file.read_text().splitlines()]
    return next(filter(None, lines), "unknown")


def licences(components: Sequence[dict[str, Any]]) -> str:
    """A table, what a server needs first."""
    rows = sorted(
        (component["scope"] != "required", component["name"].lower(), component["version"], licence_of(component))
        for component in components
    )
    lines = [
        f"| {name} | {version} | {'tests, development' if is_excluded else 'server'} | {licence} |"
        for is_excluded, name, version, licence in rows
    ]
    return "\n".join(["| package | version | for | licence |", "|---|---|---|---|", *lines, ""])


def ask_for_advisories(command: Sequence[str], components: Sequence[dict[str, Any]], folder: Path) -> str:
    """What pip-audit prints, as JSON, of exactly these versions."""
    pins = folder / "requirements.txt"
    # torch's "+cpu" is a build, not a version
    lines = [f"{component['name']}=={Version(component['version']).public}\n" for component in components]
    pins.write_text("".join(sorted(lines)))
    options = f"--no-deps --disable-pip --progress-spinner off --format json --timeout {TIMEOUT_S}".split()
    asked = subprocess.run(  # noqa: S603 - our own arguments
        [*command, "--requirement", str(pins), *options], check=False, capture_output=True, text=True
    )
    return asked.stdout


def read_advisories(answer: str) -> tuple[int, str]:
    """Weak packages, and what to say. An answer about no package at all is that of an index without advisories."""
    try:
        found = json.loads(answer)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return 0, NO_ADVISORIES
    asked = [package for package in found if "skip_reason" not in package]
    if not asked:
        return 0, NO_ADVISORIES
    lines = [
        f"{package['name']} {package['version']}: {weakness['id']}, "
        f"fixed in {', '.join(weakness['fix_versions']) or 'no version yet'}"
        for package in asked
        for weakness in package["vulns"]
    ]
    weak = [package for package in asked if package["vulns"]]
    unknown = [package["name"] for package in found if "skip_reason" in package]
    lines.append(f"advisories: {len(weak)} of {len(asked)} packages have a known weakness")
    if unknown:
        lines.append(f"the index has no entry for {', '.join(sorted(unknown))}")
    return len(weak), "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tools", type=Path, default=ROOT / "build/audit-venv", metavar="DIR", help="their environment"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build/audit", metavar="DIR")
    options = parser.parse_args(arguments)
    bill = bill_of_materials(options.tools / "bin" / "cyclonedx-py", options.out / "sbom.json")
    components = bill["components"]
    (options.out / "licences.md").write_text(licences(components))
    num_needed = sum(component["scope"] == "required" for component in components)
    print(f"{options.out}/sbom.json, licences.md: {len(components)} packages, of which a server needs {num_needed}")
    answer = ask_for_advisories([str(options.tools / "bin" / "pip-audit")], components, options.out)
    num_weak, summary = read_advisories(answer)
    print(summary)
    return 1 if num_weak else 0


if __name__ == "__main__":
    raise SystemExit(main())
