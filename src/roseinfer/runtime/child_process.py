"""Starts a module of ours in a process of its own that is nicer from its first import on. Knows not what it does.

`python -m roseinfer.runtime.child_process INCREMENT MODULE` is that process. A child that made itself
nicer when its imports are done would have taken a core for a second by then, from the front end that started it.
"""

import runpy
import subprocess
import sys
from typing import IO

from roseinfer.runtime.niceness import be_nicer


def start_nicer_child(module: str, increment: int, stderr: int | IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Run `module` as a program between two pipes, in a session of its own, so that Ctrl-C does not reach it."""
    # -P: nothing from the working directory
    command = [sys.executable, "-P", "-m", "roseinfer.runtime.child_process", str(increment), module]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, start_new_session=True)  # noqa: S603


def main() -> None:
    be_nicer(int(sys.argv[1]))
    runpy.run_module(sys.argv[2], run_name="__main__")


if __name__ == "__main__":
    main()
