"""Writes constraints.txt: the installed version of each package that pyproject.toml pulls in, and of no other.

Call it through `make constraints`, then run `make test`, then commit.
"""

import importlib.metadata
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PLATFORM_PACKAGES = ("nvidia-", "cuda-", "flashinfer")  # for a GPU alone: a CPU build of torch has none of them

HEADER = """\
# The versions that roseinfer is tested with: everything its dependencies and extras pull in, and nothing else.
# `make constraints` writes this file, with the newest versions that pyproject.toml allows; test before committing it.
"""


def declared() -> Iterator[Requirement]:
    """The requirements of pyproject.toml, extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in (
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ):
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


def main() -> None:
    pins = sorted(closure(declared()).items())
    (ROOT / "constraints.txt").write_text(HEADER + "".join(f"{name}=={version}\n" for name, version in pins))
    print(f"constraints.txt: {len(pins)} packages")


if __name__ == "__main__":
    main()
