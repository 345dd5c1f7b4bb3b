"""Turns the flags of `roseinfer serve` into a server that is ready, and ends it. Sends no load."""

import asyncio
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roseinfer.bench.load.client import get
from roseinfer.errors import ConfigError

STOP_TIMEOUT_S = 60.0
_LOG_TAIL = 600  # characters of what it said, for whoever wonders why it did not start


@contextmanager
def serving(flags: str, param: str, timeout_s: float) -> Iterator[str]:
    """The URL of a server with these flags, which is stopped at the end. Raises ConfigError when it does not start."""
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise ConfigError(f"{error}, got {flags!r}", param=param) from None
    port = _free_port()
    command = [sys.executable, "-m", "roseinfer", "serve", "--port", str(port), "--ops-port", "0", *words]
    with tempfile.TemporaryDirectory(prefix="roseinfer-compare-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)  # noqa: S603
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, log, param, timeout_s)
            yield url
        finally:
            _stop(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, param: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        try:
            asyncio.run(get(f"{url}/readyz", "", param))
        except ConfigError:
            time.sleep(0.1)
        else:
            return
    why = f"was not ready after {timeout_s:g} s" if process.poll() is None else f"ended with {process.returncode}"
    raise ConfigError(f"the server {why}: {log.read_text(errors='replace')[-_LOG_TAIL:].strip()}", param=param)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
