"""Checks that output files and folders are writable before work starts."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from roseinfer.errors import ConfigError


def check_outputs(**files: Path | None) -> None:
    """Check files by the names of their flags, and leave each as it was. Raises ConfigError that names the flag."""
    flags: dict[Path, str] = {}
    for name, file in files.items():
        _check(name, file, _try_to_open)
        if file is not None and not _is_special(file):
            flag = _flag_of(name)
            if (other := flags.setdefault(file.resolve(), flag)) != flag:
                raise ConfigError(f"{file} is the file of {other} too", param=flag)


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
            param = name if "." in name else _flag_of(name)
            raise ConfigError(f"{path} cannot be written: {error.strerror}", param=param) from None


def _flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _is_special(file: Path) -> bool:
    """Whether it is a pipe or a device, such as /dev/null."""
    return file.exists() and not (file.is_file() or file.is_dir())


def _try_to_open(file: Path) -> None:
    if _is_special(file):
        return  # the reader of a pipe would take this for its end
    is_new = not file.exists() and not file.is_symlink()
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
