"""Compiles and interprets the CUDA kernels with each version of Triton that they are said to run with.

    python tools/triton_matrix.py [--versions 3.4.0,3.9.0] [--dir build/triton]              (`make triton-matrix`)

By default the newest patch of each minor version on the index, from the floor in pyproject.toml on. A version has an
environment of its own, with everything else from the one that runs this: the tests that interpret the kernels, and
those that compile them for GPUs of several generations, are run there as they are. No GPU is needed. It prints a
table, and exits with 1 if a version fails.
"""

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

from generated_files import ROOT

TIMEOUT_S = 1800


class Outcome(NamedTuple):
    """How the tests went with a version."""

    version: str
    summary: str  # pytest's last line
    is_good: bool

    def row(self) -> str:
        return f"| {self.version} | {self.summary} |"


def floor() -> Requirement:
    """What the extra `cuda` asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [wanted] = map(Requirement, project["optional-dependencies"]["cuda"])
    return wanted


def newest_patches(printed: str, wanted: Requirement) -> list[str]:
    """Of what `pip index versions` prints, the newest patch of each minor version that is allowed, oldest first."""
    [listed] = re.findall(r"^Available versions: (.*)$", printed, re.MULTILINE)
    allowed = sorted(version for version in map(Version, listed.split(", ")) if version in wanted.specifier)
    return [str(version) for version in {version.release[:2]: version for version in allowed}.values()]


def tests_of_kernels() -> list[str]:
    """The files with tests that interpret or compile kernels in processes of their own."""
    files = sorted((ROOT / "tests" / "unit").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "triton_processes" in file.read_text()]


def pip(*words: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout  # noqa: S603 - our own words


def environment_of(version: str, directory: Path) -> Path:
    """The Python of an environment that has this Triton before all that the running one has."""
    python = directory / version / "bin" / "python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory / version], check=True)  # noqa: S603
        pip("--python", str(python), "install", "--quiet", "--no-deps", f"triton=={version}")
        [packages] = (directory / version / "lib").glob("python*/site-packages")
        (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_with(version: str, directory: Path) -> Outcome:
    python = environment_of(version, directory)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    used = subprocess.run(  # noqa: S603 - the environment above
        [python, "-c", "import triton; print(triton.__version__)"], check=True, text=True, stdout=subprocess.PIPE
    ).stdout.strip()
    assert used == version, f"{used} is imported in place of {version}"
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-o",
        f"cache_dir={directory / 'pytest'}",
        "--tb=short",
        *tests_of_kernels(),
    ]
    log = directory / f"{version}.log"
    with log.open("w") as output:
        code = subprocess.run(  # noqa: S603
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False
        ).returncode
    return Outcome(version, log.read_text().strip().splitlines()[-1].strip("= "), code == 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", metavar="V,V", help="default: the newest patches on the index")
    parser.add_argument("--dir", type=Path, default=ROOT / "build" / "triton", metavar="DIR", help="of environments")
    arguments = parser.parse_args()
    directory: Path = arguments.dir.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    versions = (
        arguments.versions.split(",")
        if arguments.versions
        else newest_patches(pip("index", "versions", "triton"), floor())
    )
    outcomes = []
    for version in versions:
        began = time.monotonic()
        outcomes.append(test_with(version, directory))
        print(f"{version}: {outcomes[-1].summary}, after {time.monotonic() - began:.0f} s", flush=True)
    print("\n".join(["| Triton | tests |", "|---|---|", *(outcome.row() for outcome in outcomes)]))
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
