"""Compiles the C++ kernels into one shared object for each level, in the user's cache.

The object is named by its level, a digest of sources and flags, and a digest of the compiler's version. It gets that
name when it is complete: two builders at once make the same file twice, and a reader never sees half of one. It is
linked to no OpenMP runtime: its symbols resolve to the one that torch has loaded (`library.py`), since two pools of
threads on the same cores would wait for each other.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from roseinfer.errors import ConfigError
from roseinfer.model.kernels.levels import Level, digest, sources

COMPILERS = ("g++", "clang++", "c++")

OnProgress = Callable[[int], None]  # takes the number of files compiled so far


def find_compiler(named: str | None = None) -> str:
    """The path of the compiler called `named`, or of the first usual one. Raises ConfigError if there is none."""
    names = (named,) if named else COMPILERS
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise ConfigError(
            f"No C++ compiler is on the PATH ({', '.join(names)}): install one, for instance with `apt-get install "
            "g++`, or go on without compiled kernels, in plain torch and slower."
        )
    return path


def build_kernels(
    level: Level, kernels_dir: Path, compiler: str, on_progress: OnProgress = lambda *_: None
) -> tuple[Path, bool]:
    """The shared object of the present sources at this level, and whether it was compiled now.

    Raises ConfigError when compilation fails, or the directory cannot be written.
    """
    target = kernels_dir / f"{level.name}-{digest(level)}-{_compiler_digest(compiler)}.so"
    if target.is_file():
        return target, False
    try:
        kernels_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=kernels_dir) as work:
            shared_object = _compile(level, Path(work), compiler, on_progress)
            os.replace(shared_object, target)
    except OSError as error:
        raise ConfigError(f"{error.filename or kernels_dir}: {error.strerror}", param="runner.kernels_dir") from None
    return target, True


def _compile(level: Level, work: Path, compiler: str, on_progress: OnProgress) -> Path:
    """Compile as many sources at once as there are cores, and link the objects into one shared object."""
    files = sources()
    objects = [work / f"{path.stem}.o" for path in files]
    commands = [
        [compiler, *level.compiler_flags, "-c", str(path), "-o", str(made)]
        for path, made in zip(files, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(_run, command) for command in commands]
        for num_done, future in enumerate(as_completed(futures), 1):
            future.result()
            on_progress(num_done)
    shared_object = work / "kernels.so"
    _run([compiler, "-shared", *map(str, objects), "-o", str(shared_object)])
    return shared_object


def _run(command: Sequence[str]) -> str:
    """Standard output of a compiler run. Raises ConfigError with the compiler's first error."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)  # noqa: S603
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line), lines[-1] if lines else f"exit {done.returncode}")
        raise ConfigError(f"{Path(command[0]).name} did not compile the kernels: {first}")
    return done.stdout


def _compiler_digest(compiler: str) -> str:
    """Digest of the compiler's version: another one may fuse other products."""
    return hashlib.sha256(_run([compiler, "--version"]).encode()).hexdigest()[:8]
