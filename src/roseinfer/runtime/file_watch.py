"""Watches files, and reads them again after a change.

It looks at them every few seconds, which works on every file system, also where Kubernetes swaps a link to rotate a
mounted secret.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from roseinfer.errors import ConfigError

WATCH_INTERVAL_S = 2.0

_log = logging.getLogger(__name__)

T = TypeVar("T")

State = tuple[tuple[int, int, int] | None, ...]


def state_of(paths: Sequence[Path]) -> State:
    """For each file its inode, size and time of writing; None for a file that does not exist."""

    def one(path: Path) -> tuple[int, int, int] | None:
        try:
            found = path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    return tuple(map(one, paths))


class WatchedFiles:
    """Watched files. Make it before they are read for the first time, so that no change is missed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._seen = state_of(paths)

    async def watch(self, read: Callable[[], T], take: Callable[[T], None]) -> None:
        """After each change, call `read` in a thread and `take` with its result on the loop. Without files it returns.

        When `read` fails, the error is logged and the result before stays; the next change is the next attempt.
        """
        names = ", ".join(map(str, self._paths))
        while self._paths:
            await asyncio.sleep(WATCH_INTERVAL_S)
            now = await asyncio.to_thread(state_of, self._paths)
            if now == self._seen:
                continue
            self._seen = now
            try:
                take(await asyncio.to_thread(read))
            except ConfigError as error:
                _log.error("a changed file cannot be used; what it held before stays", extra={"why": error.message})
            except (OSError, ValueError):  # which `read` should have made a ConfigError
                _log.exception("a changed file cannot be used; what it held before stays", extra={"files": names})
            else:
                _log.info("a changed file was read again", extra={"files": names})
