"""Shows the progress of long work on standard error, once it has taken a second.

On a terminal it is a live line that vanishes at the end; elsewhere plain lines, one for each change, not too often.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from roseinfer.messages import StartupProgress

_PATIENCE_S = 1.0
_REFRESH_S = 0.1
_PLAIN_REFRESH_S = 1.0
_PLAIN_INTERVAL_S = 5.0  # between lines that differ in their count alone


class Progress:
    """`with Progress("warmup 1/2", total=8192) as progress: progress.update(done=17)`; any thread may update."""

    def __init__(self, what: str, *, total: int | None = None, done: int = 0) -> None:
        self._what = what
        self._total = total
        self._done = done
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def update(self, *, done: int = 0, what: str | None = None) -> None:
        self._done = done
        if what is not None:
            self._what = what

    def count(self, done: int) -> None:
        """Update the count, as a callback."""
        self.update(done=done)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _show(self) -> None:
        if self._over.wait(_PATIENCE_S):
            return
        if sys.stderr.isatty():
            self._show_live()
        else:
            self._show_lines()

    def _show_live(self) -> None:
        from rich import progress
        from rich.console import Console

        columns = [progress.SpinnerColumn(), progress.TextColumn("{task.description}"), progress.TimeElapsedColumn()]
        if self._total is not None:
            columns[2:2] = [progress.BarColumn(), progress.MofNCompleteColumn()]
        with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(self._what, total=self._total)
            while not self._over.wait(_REFRESH_S):
                bar.update(task, description=self._what, completed=self._done)

    def _show_lines(self) -> None:
        shown, shown_at, counted = "", 0.0, 0
        while True:
            now = time.monotonic()
            if self._what != shown or (self._total is not None and now - shown_at >= _PLAIN_INTERVAL_S):
                shown, shown_at = self._what, now
                counted = self._write(shown)
            if self._over.wait(_PLAIN_REFRESH_S):
                break
        if self._total is not None and self._done != counted:  # or it would seem to have stopped there
            self._write(shown)

    def _write(self, what: str) -> int:
        """Write one plain line. Returns the count in it."""
        done = self._done
        sys.stderr.write(f"roseinfer: {what}" + ("" if self._total is None else f": {done}/{self._total}") + "\n")
        sys.stderr.flush()
        return done


@contextmanager
def show_loading(path: str) -> Iterator[Callable[[StartupProgress], None]]:
    """Show the stages of an engine's start, which the caller passes to the function that this yields."""
    with Progress(f"loading {path}") as progress:
        yield lambda stage: progress.update(what=stage.detail or stage.stage)
