"""Writes constraints.txt: the installed version of each package that pyproject.toml pulls in, and of no other.

Call it through `make constraints`, then run `make test`, then commit. Ends with 1 when the image for arm64 would lack a
wheel: the tests build the image for this machine only.
"""

import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PLATFORM_PACKAGES = ("nvidia-", "cuda-", "flashinfer")  # for a GPU alone: a CPU build of torch has none of them

IMAGE_PYTHON = ("--python-version=3.11", "--implementation=cp")  # of the Dockerfile's base
IMAGE_EXTRAS = ("loadtest",)  # that deploy/compose wants
ARM64 = ("manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 37)))  # to bookworm's glibc

HEADER = """\
# The versions that roseinfer is tested with: everything its dependencies and extras pull in, and nothing else.
# `make constraints` writes this file, with the newest versions that pyproject.toml allows; test before committing it.
"""


def declared(extras: Iterable[str] | None = None) -> Iterator[Requirement]:
    """The requirements of pyproject.toml, with all extras or those named."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *(text for extra in extras or of_extras for text in of_extras[extra])):
        yield Requirement(text)


def closure(requirements: Iterable[Requirement]) -> dict[str, str]:
    """Canonical name -> installed version of the requirements and of all that they require on this machine."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = list(requirements)
    while todo:
        requirement = todo.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen or name.startswith(PLATFORM_PACKAGES):
            continue
        seen.add((name, extras))
        distribution = importlib.metadata.distribution(name)
        versions[name] = Version(distribution.version).public  # torch's "+cpu" is a build, not a version
        for text in distribution.requires or ():
            wanted = Requirement(text)
            if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in extras | {""}):
                todo.append(wanted)
    return versions


def without_wheel(name: str, version: str) -> bool:
    """Whether the index has no wheel of a package for arm64, of those that differ by platform."""
    if "Root-Is-Purelib: true" in (importlib.metadata.distribution(name).read_text("WHEEL") or ""):
        return False
    command = [sys.executable, "-m", "pip", "index", "versions", name, "--only-binary=:all:", *IMAGE_PYTHON]
    command += [f"--platform={platform}" for platform in ARM64]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout  # noqa: S603
    return version not in printed.partition("Available versions: ")[2].partition("\n")[0].split(", ")


def main() -> int:
    pins = sorted(closure(declared()).items())
    (ROOT / "constraints.txt").write_text(HEADER + "".join(f"{name}=={version}\n" for name, version in pins))
    print(f"constraints.txt: {len(pins)} packages")
    missing = [name for name, version in closure(declared(IMAGE_EXTRAS)).items() if without_wheel(name, version)]
    if missing:
        print(f"without a wheel for arm64, which the image needs there: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
