"""Starts a server as a process, waits until it is ready, and ends it."""

import http.client
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from roseinfer.runtime.child_process import die_with_parent

START_TIMEOUT_S = 110.0  # on a machine that does much else
STOP_TIMEOUT_S = 90.0
_LOG_TAIL = 600  # characters of its log in an error


class LaunchFailed(RuntimeError):
    """The server did not become ready."""


def free_port() -> int:
    """A port of this host on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A server process that listens on a port of this host."""

    poll_s = 0.05  # between two looks at whether it is ready

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path | None = None,
        *,
        ops_port: int = 0,
        environment: Mapping[str, str] | None = None,
        has_owner: bool = False,
    ) -> None:
        """Without a log and an environment the process has this one's. It has a session of its own, so that an
        interrupt of this process does not reach it. With `has_owner` it gets SIGTERM when this thread ends, also one
        that is killed, or that a second signal keeps from stopping it.
        """
        self.port, self.ops_port = port, ops_port
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = log
        with nullcontext() if log is None else log.open("ab") as output:
            self.process = subprocess.Popen(  # noqa: S603 - what the caller asked for
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGTERM) if has_owner else None,  # noqa: PLW1509 - two calls
            )
        self.pid = self.process.pid

    def is_ready(self) -> bool:
        return self.status("/readyz") == 200

    def status(self, path: str) -> int:
        """The HTTP status of a GET, 0 when nothing answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Raises LaunchFailed with the end of the log."""
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            code = self.process.poll()
            if code is not None or time.monotonic() > deadline:
                why = f"was not ready after {timeout_s:g} s" if code is None else f"ended with {code}"
                raise LaunchFailed(f"the server {why}: {self.log()[-_LOG_TAIL:].strip()}")
            time.sleep(self.poll_s)

    def log(self) -> str:
        return "" if self.log_path is None else self.log_path.read_text(errors="replace")

    def engine_pid(self) -> int:
        """The child that is the engine."""
        return self._child_pid("engine")

    def telemetry_pid(self) -> int:
        """The telemetry process: the only fork of the child that has its command line."""
        (found,) = _children(self._child_pid("telemetry"))
        return int(found)

    def _child_pid(self, name: str) -> int:
        """The child that runs this command; another one may check grammars."""
        children = _children(self.pid)
        words = {child: Path(f"/proc/{child}/cmdline").read_bytes().rstrip(b"\0").split(b"\0") for child in children}
        (found,) = (child for child in children if words[child][-3:-1] == [name.encode(), b"--fd"])
        return int(found)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Signal the process, kill it when it does not end in time, and return its exit code."""
        self.process.send_signal(number)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def _children(pid: int) -> set[str]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {child for task in tasks for child in (task / "children").read_text().split()}


def serve_command(port: int, ops_port: int, flags: Sequence[str]) -> list[str]:
    """`roseinfer serve`; the flags come last, so they are stronger than the ports."""
    ports = ["--port", str(port), "--ops-port", str(ops_port)]
    return [sys.executable, "-m", "roseinfer", "serve", *ports, *flags]


@contextmanager
def serving(
    *flags: str, ops_port: int = 0, log: Path | None = None, timeout_s: float = START_TIMEOUT_S
) -> Iterator[Server]:
    """A ready `roseinfer serve` on a free port, which is stopped at the end. Raises LaunchFailed."""
    port = free_port()
    server = Server(serve_command(port, ops_port, flags), port, log, ops_port=ops_port, has_owner=True)
    try:
        server.wait_ready(timeout_s)
        yield server
    finally:
        server.stop()
