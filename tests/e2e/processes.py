"""Finds the processes of this machine in /proc."""

from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # its thread has ended
            for child in map(int, children.read_text().split()):
                found += [child, *descendants(child)]
    return found


def words_of(pid: int) -> list[str]:
    """The command of a process; [""] for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().removesuffix("\0").split("\0")
    except OSError:
        return [""]
