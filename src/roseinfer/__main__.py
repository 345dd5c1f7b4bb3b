"""`python -m roseinfer`: the same as the `roseinfer` command."""

import signal
import sys


def main() -> int:
    """Run the command and return its exit code.

    Ctrl-C ends Python while it imports the command, and is ignored while Python ends: either would be a traceback.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler != signal.SIG_IGN:  # as in the background of a shell
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from roseinfer.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    try:
        return run()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
