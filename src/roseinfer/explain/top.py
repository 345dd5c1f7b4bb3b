"""What `roseinfer top` does: asks a server every second and shows the answers until somebody presses q."""

import argparse
import contextlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from roseinfer.config.sources import LoadedConfig
from roseinfer.errors import ConfigError, InvalidRequest
from roseinfer.explain.command import read_key
from roseinfer.explain.live import LiveServer, Sample
from roseinfer.explain.screen import render

_PLAIN_SIZE = (80, 24)  # where there is no terminal


def run_top(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    """Show one server until q or Ctrl-C; with `--once` one frame. Raises InvalidRequest when it does not answer."""
    server = LiveServer(arguments.url, read_key(loaded.config))
    if arguments.once:
        _show_once(server, arguments.interval)
    elif sys.stdin.isatty() and sys.stdout.isatty():
        _show_live(server, arguments.interval, arguments.window)
    else:
        raise ConfigError("needs a terminal; --once prints one frame anywhere")
    return 0


def _show_once(server: LiveServer, interval_s: float) -> None:
    """Rates need two samples: a server counts, and does not know how much it had counted a second ago."""
    first = server.sample()
    sys.stderr.write(f"asking again in {interval_s:g} s: rates and percentiles are of what comes in between\n")
    sys.stderr.flush()
    time.sleep(interval_s)
    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_SIZE[0], height=_PLAIN_SIZE[1])
    console.print(render([first, server.sample()], Text(server.url), console.width, console.height))


def _show_live(server: LiveServer, interval_s: float, window_s: float) -> None:
    console = Console()
    samples = deque([server.sample()])
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        where = _hint(server)
        while True:
            # One line less than there are: a full screen would scroll.
            live.update(render([*samples], where, console.width, console.height - 1), refresh=True)
            if pressed(interval_s) == "q":
                return
            where = _take(server, samples, window_s)


def _hint(server: LiveServer) -> Text:
    return Text.assemble(server.url, ("  q leaves", "dim"))


def _take(server: LiveServer, samples: deque[Sample], window_s: float) -> Text:
    """One more sample, and none older than the window; what to say beside it."""
    try:
        samples.append(server.sample())
    except InvalidRequest as error:
        return Text(f"{error.param} {error.message}", "bold red")
    while len(samples) > 2 and samples[1].at_s <= samples[-1].at_s - window_s:
        samples.popleft()
    return _hint(server)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits for a key, at most so many seconds; the terminal hands over keys as they come."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(timeout_s: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], timeout_s)
        return os.read(descriptor, 1).decode("ascii", "replace") if ready else ""

    tty.setcbreak(descriptor)
    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
