"""Turns a change of a file into a call, away from the event loop. Knows nothing of what the files hold.

Looking is cheap and works on every file system, also where Kubernetes swaps a link to rotate a mounted secret.
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
    """For each file what changes with it: its number, its size, when it was written; None for one that is not there."""

    def one(path: Path) -> tuple[int, int, int] | None:
        try:
            found = path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    return tuple(map(one, paths))


class WatchedFiles:
    """Files, and what they were like when they were named here: before they were read for the first time."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._seen = state_of(paths)

    async def watch(self, read: Callable[[], T], take: Callable[[T], None], interval_s: float) -> None:
        """Whenever one of them has changed, `read` in a thread and `take` the result on the loop; never returns.

        When `read` fails it is logged and what was taken before stays; the next change is the next attempt.
        """
        names = ", ".join(map(str, self._paths))
        while True:
            await asyncio.sleep(interval_s)
            now = await asyncio.to_thread(state_of, self._paths)
            if now == self._seen:
                continue
            self._seen = now
            try:
                take(await asyncio.to_thread(read))
            except ConfigError as error:
                _log.error("a changed file cannot be used; what it held before stays", extra={"why": error.message})
            except (OSError, ValueError):  # of a file and of what it holds; who reads should have told it as the other
                _log.exception("a changed file cannot be used; what it held before stays", extra={"files": names})
            else:
                _log.info("a changed file was read again", extra={"files": names})
