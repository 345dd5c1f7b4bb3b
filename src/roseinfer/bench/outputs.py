"""Whether the files that a benchmark shall write can be written, asked while there is nothing to lose yet."""

from pathlib import Path

from roseinfer.errors import ConfigError


def check_outputs(**files: Path | None) -> None:
    """By their flags; leaves every one as it was. Raises ConfigError that names the flag of the one that cannot."""
    for name, file in files.items():
        if file is not None:
            try:
                _try_to_open(file)
            except OSError as error:
                raise ConfigError(f"{file} cannot be written: {error.strerror}", param=f"--{name}") from None


def _try_to_open(file: Path) -> None:
    is_there = file.exists()
    if is_there and not (file.is_file() or file.is_dir()):
        return  # whoever reads a pipe would take this for its end
    is_new = not is_there and not file.is_symlink()
    with file.open("ab"):
        pass
    if is_new:
        file.unlink()
