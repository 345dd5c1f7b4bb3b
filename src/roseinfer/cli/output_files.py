"""Checks that output files and folders are writable before work starts."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from roseinfer.errors import ConfigError


def check_outputs(**files: Path | None) -> None:
    """Check files by the names of their flags, and leave each as it was. Raises ConfigError that names the flag."""
    for name, file in files.items():
        _check(name, file, _try_to_open)


def check_folder(name: str, folder: Path | None) -> None:
    """Check a folder, which the command will make where there is none. Raises ConfigError.

    `name` is that of a flag, or the path of an option.
    """
    _check(name, folder, _try_to_fill)


def _check(name: str, path: Path | None, attempt: Callable[[Path], None]) -> None:
    if path is not None:
        try:
            attempt(path)
        except OSError as error:
            param = name if "." in name else f"--{name.replace('_', '-')}"
            raise ConfigError(f"{path} cannot be written: {error.strerror}", param=param) from None


def _try_to_open(file: Path) -> None:
    is_there = file.exists()
    if is_there and not (file.is_file() or file.is_dir()):
        return  # the reader of a pipe would take this for its end
    is_new = not is_there and not file.is_symlink()
    with file.open("ab"):
        pass
    if is_new:
        file.unlink()


def _try_to_fill(folder: Path) -> None:
    missing = [each for each in (folder, *folder.parents) if not each.exists()]  # the innermost is the first
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    finally:
        for each in missing:
            if each.is_dir():
                each.rmdir()
