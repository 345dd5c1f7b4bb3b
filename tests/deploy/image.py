"""Turns the Dockerfile into an image with buildah, without a registry. Knows nothing of what the image holds.

The base is a Debian with the packages that `python:3.11-slim` has for us, and a compiler; the Python packages come
from a folder of wheels. Everything is kept below one directory, under digests of what it was made from, so that the
next session builds only what has changed.
"""

import fcntl
import hashlib
import json
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.conftest import require_tool
from tests.repo.tree import ROOT

BASE_PACKAGES = ("python3", "python3-venv", "g++", "ca-certificates")
BASE_SUITE = "bookworm"  # its Python is 3.11
PYTHON_VERSION = "3.11"
EXTRA = "loadtest"
WITHOUT = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
CONTEXT = ("Dockerfile", ".dockerignore", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")


class BuildError(AssertionError):
    """What a builder wrote before it gave up."""


class ImageStore:
    """Images and containers below one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    @cached_property
    def _driver(self) -> str:
        """`overlay` where the system lets us mount one; `vfs`, which copies every layer, where it does not."""
        try:
            run([*self._command("overlay"), "rm", run([*self._command("overlay"), "from", "scratch"])])
        except BuildError:
            return "vfs"
        return "overlay"

    def _command(self, driver: str) -> list[str]:
        places = ["--root", str(self.directory / driver), "--runroot", str(self.directory / f"{driver}-run")]
        return [require_tool("buildah"), "--storage-driver", driver, *places]

    def buildah(self, *arguments: str) -> str:
        return run([*self._command(self._driver), *arguments])

    def names(self) -> set[str]:
        return set(self.buildah("images", "--noheading", "--format", "{{.Name}}:{{.Tag}}").split())

    @contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        """The root of a new container of this image."""
        container = self.buildah("from", "--pull-never", image)
        try:
            yield Path(self.buildah("mount", container))
        finally:
            self.buildah("rm", container)

    def config(self, image: str) -> dict[str, Any]:
        """What the image says of itself, with Docker's names: `Entrypoint`, `Env`, `Healthcheck`, `Labels` …"""
        config: dict[str, Any] = json.loads(self.buildah("inspect", "--type", "image", image))["Docker"]["config"]
        return config

    def base(self) -> str:
        """A Debian that has what the Dockerfile asks of its base."""
        name = f"localhost/base:{digest(BASE_SUITE, *BASE_PACKAGES, *WITHOUT)}"
        if name not in self.names():
            container = self.buildah("from", "scratch")
            include = f"--include={','.join(BASE_PACKAGES)}"
            root = self.buildah("mount", container)
            run([require_tool("mmdebstrap"), "--quiet", "--variant=apt", include, *WITHOUT, BASE_SUITE, root])
            self.buildah("commit", "--quiet", "--rm", container, name)
        return name

    def wheels(self) -> Path:
        """A folder with the wheel of every package that the image needs, and of what builds ours."""
        tree = tomllib.loads((ROOT / "pyproject.toml").read_text())
        project = tree["project"]
        extras = [*project["optional-dependencies"][EXTRA], *project["optional-dependencies"]["kv-events"]]
        needed = [*project["dependencies"], *extras, *tree["build-system"]["requires"]]
        folder = self.directory / f"wheels-{digest(*needed, (ROOT / 'constraints.txt').read_text())}"
        if not (folder / ".whole").exists():
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
            target = ["--dest", str(folder), "--python-version", PYTHON_VERSION, "--only-binary=:all:"]
            run([*pip, *target, "-c", str(ROOT / "constraints.txt"), *needed])
            (folder / ".whole").touch()
        return folder

    def build(self, device: str) -> str:
        """The name of the image that `make image` makes of these sources, with what deploy/compose wants besides."""
        files = [*(ROOT / name for name in CONTEXT), *sorted((ROOT / "src").rglob("*"))]
        parts = [f"{path.relative_to(ROOT)} {hashed(path)}" for path in files if path.is_file() and is_source(path)]
        name = f"localhost/roseinfer-{device}:{digest(EXTRA, *parts)}"
        with self._alone():
            if name not in self.names():
                # Docker's format, since OCI's has no place for a HEALTHCHECK.
                fixed = ["--isolation", "chroot", "--format", "docker", "--pull-never", "--quiet"]
                given = [f"--build-arg=BASE_IMAGE={self.base()}", f"--build-context=wheels={self.wheels()}"]
                builder = f"IMAGE_BUILDER={shlex.join(self._command(self._driver))}"
                variables = [
                    f"DEVICE={device}",
                    f"EXTRAS={EXTRA}",
                    f"IMAGE={name}",
                    f"ARGS={shlex.join([*fixed, *given])}",
                ]
                run(["make", "-C", str(ROOT), "image", builder, *variables])
                for stale in self.names() - {name}:
                    if stale.startswith(f"{name.partition(':')[0]}:"):
                        self.buildah("rmi", stale)
        return name

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Other test processes wait, and then find what this one made."""
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def run(command: list[str]) -> str:
    """Standard output, stripped. Raises BuildError with everything that was written."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout.strip()


def is_source(path: Path) -> bool:
    return "__pycache__" not in path.parts


def hashed(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
