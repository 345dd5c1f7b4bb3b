"""Fetches the configured model into Hugging Face's cache, as the server would, and then leaves a mark; or waits for it.

`python prefetch.py fetch CONFIG MARK SECONDS`, `python prefetch.py wait MARK SECONDS`. A directory that is there may be
half of one, so pods wait for the mark; why the last attempt failed stands beside it, and a pod that waits prints it.
"""

import logging
import os
import signal
import sys
import time
from pathlib import Path

TOLD_EVERY_S = 30.0


def fetch(config_file: str, mark: str, seconds: str) -> int:
    from roseinfer.config.sources import load
    from roseinfer.errors import RoseinferError
    from roseinfer.model.weights.checkpoint import resolve_checkpoint

    logging.basicConfig(format="%(message)s")
    logging.getLogger("roseinfer").setLevel(logging.INFO)  # how far the fetch is
    model = load(file=Path(config_file)).config.model
    Path(mark).parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGALRM, lambda *_: give_up(mark, f"{model.path} has not been fetched in {seconds} s"))
    signal.setitimer(signal.ITIMER_REAL, float(seconds))
    try:
        directory = resolve_checkpoint(model.path, model.revision)
    except (RoseinferError, OSError) as error:
        why_not(mark).write_text(f"{error}\n")
        print(error, file=sys.stderr)
        return 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    Path(mark).write_text(f"{directory}\n")
    print(f"{model.path} is in {directory}")
    return 0


def give_up(mark: str, message: str) -> None:
    """End at once, whatever waits for an answer in whichever thread: an error would be taken for one of the network."""
    why_not(mark).write_text(f"{message}\n")
    print(message, file=sys.stderr, flush=True)
    os._exit(1)


def wait(mark: str, seconds: str) -> int:
    """1 when there is no mark after that time: the pod then fails by name instead of holding its GPU in silence."""
    deadline = time.monotonic() + float(seconds)
    tell_at = time.monotonic()
    while not Path(mark).exists():
        last = f"; its last attempt failed: {why_not(mark).read_text().strip()}" if why_not(mark).exists() else ""
        if time.monotonic() >= deadline:
            print(f"The prefetch job has not fetched the model in {seconds} s{last}", file=sys.stderr)
            return 1
        if time.monotonic() >= tell_at:
            tell_at += TOLD_EVERY_S
            print(f"waiting for the prefetch job{last}", flush=True)
        time.sleep(0.5)
    return 0


def why_not(mark: str) -> Path:
    return Path(f"{mark}.failed")


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    sys.exit({"fetch": fetch, "wait": wait}[command](*arguments))
