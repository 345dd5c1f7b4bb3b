"""Starts processes of ours, and exchanges typed requests and answers with those that are behind pipes.

A frame is a msgpack message and a payload of bytes. A payload of many megabytes is not copied by an encoder, and both
ends write and read it without the GIL.
"""

import contextlib
import ctypes
import math
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple, Protocol, TypeVar

import msgspec

from roseinfer.errors import InvalidRequest, NotReady

Request = TypeVar("Request")

_HEAD = struct.Struct("<QQ")  # bytes of the message, of the payload
_PR_SET_PDEATHSIG = 1  # prctl(2)
_PATIENCE = 5  # times that a deadline may take on the clock, where the child got no processor
_LEAST_WAIT_S = 0.01  # the system counts no finer


class Answer(NamedTuple):
    """What a child answers: the result, or why it refuses the request."""

    refusal: str
    payload: bytes


class ChildProcess:
    """Runs a module of ours as a process that answers one request at a time.

    The process starts at the first request, and again at the next one when it has ended. Every method may be called in
    any thread, and blocks; the process ends with the thread whose request started it.
    """

    def __init__(self, module: str, *, niceness: int, stderr: int | None = None) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._arguments = ("-P", "-m", "roseinfer.runtime.niceness", str(niceness), module)  # -P: no module of the cwd
        self._stderr = stderr
        self._turn = threading.Lock()  # held for a request
        self._is_closed = False

    def request(self, message: msgspec.Struct, payload: bytes = b"", timeout_s: float | None = None) -> Answer:
        """Return the child's answer. A child that fails to answer is ended.

        The timeout counts the child's processor time, since others may have the cores; on the clock it may take five
        times as long. Raises TimeoutError; EOFError when the child ends first; NotReady after `close`.
        """
        with self._turn:
            if self._is_closed:
                raise NotReady("The server is shutting down.")
            if self.process is None:
                pipe = subprocess.PIPE
                self.process = start_process(self._arguments, stdin=pipe, stdout=pipe, stderr=self._stderr)
            try:
                return _exchange(self.process, message, payload, timeout_s)
            except (EOFError, BrokenPipeError, TimeoutError) as error:
                self._end(self.process)
                if self._is_closed:
                    raise NotReady("The server is shutting down.") from None
                if isinstance(error, TimeoutError):
                    raise
                raise EOFError(f"the process of {self._arguments[-1]} ended before it answered") from None

    def end(self) -> None:
        """End the process between two requests."""
        with self._turn:
            if self.process is not None:
                self._end(self.process)

    def close(self) -> None:
        """End the process and the request under way, and start no other. Idempotent."""
        self._is_closed = True
        process = self.process
        if process is not None:
            process.kill()  # the thread that waits for its answer holds the turn
        self.end()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        with contextlib.suppress(BrokenPipeError):  # of what it had not read
            process.communicate()
        self.process = None


def start_process(
    arguments: Sequence[str],
    *,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start this interpreter in a session of its own, so that Ctrl-C does not reach it."""
    command = [sys.executable, *arguments]
    return subprocess.Popen(  # noqa: S603
        command, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=pass_fds, start_new_session=True
    )


class Child(Protocol):
    """What can be done with a `subprocess.Popen`, and with a fork."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""


class ForkedChild:
    """A fork of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        deadline_s = math.inf if timeout is None else time.monotonic() + timeout
        while self._code is None:
            left_s = deadline_s - time.monotonic()
            pid, status = os.waitpid(self.pid, 0 if timeout is None else os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif left_s <= 0:
                raise subprocess.TimeoutExpired("", timeout or 0.0)
            else:
                time.sleep(min(_LEAST_WAIT_S, left_s))
        return self._code


def end_process(process: Child, timeout_s: float, longest_s: float = 0.0, waits_for: int = 0) -> bool:
    """Wait for a process that was asked to end, and kill it after the timeout; returns whether it ended by itself.

    Up to `longest_s`, time in which it, or the process `waits_for`, was ready to run and others had the processors
    does not count.
    """
    pid = waits_for or process.pid
    begin_s, waited_before_s = time.monotonic(), waited_s(pid)
    left_s = timeout_s
    while left_s > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(left_s, _LEAST_WAIT_S))
            return True
        limit_s = max(timeout_s, min(timeout_s + waited_s(pid) - waited_before_s, longest_s))
        left_s = begin_s + limit_s - time.monotonic()
    process.kill()
    process.wait()
    return False


def waited_s(pid: int) -> float:
    """How long a process has been ready to run and had no core, where the system counts that."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _exchange(
    child: subprocess.Popen[bytes], message: msgspec.Struct, payload: bytes, timeout_s: float | None
) -> Answer:
    assert child.stdin is not None
    assert child.stdout is not None
    used_before_s = _processor_s(child.pid)
    begin_s = time.monotonic()
    _send(child.stdin, message, payload)
    if timeout_s is not None:
        _wait_for_answer(child.stdout, child.pid, timeout_s, used_before_s, begin_s)
    return Answer(*_receive(child.stdout, str))


def _wait_for_answer(answers: IO[bytes], pid: int, timeout_s: float, used_before_s: float, begin_s: float) -> None:
    poller = select.poll()  # select() cannot wait for descriptors above 1023
    poller.register(answers, select.POLLIN)
    left_s = timeout_s
    while left_s > 0 and time.monotonic() < begin_s + _PATIENCE * timeout_s:
        if poller.poll(max(left_s, _LEAST_WAIT_S) * 1e3):
            return
        left_s = timeout_s - (_processor_s(pid) - used_before_s)
    raise TimeoutError


def _processor_s(pid: int) -> float:
    """Seconds of a core that a process has used; 0 for one that has ended, as its pipe will say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _send(file: IO[bytes], message: object, payload: bytes) -> None:
    encoded = msgspec.msgpack.encode(message)
    file.write(_HEAD.pack(len(encoded), len(payload)) + encoded)
    file.write(payload)
    file.flush()


def _receive(file: IO[bytes], kind: type[Request]) -> tuple[Request, bytes]:
    message_length, payload_length = _HEAD.unpack(_read(file, _HEAD.size))
    return msgspec.msgpack.decode(_read(file, message_length), type=kind), _read(file, payload_length)


def _read(file: IO[bytes], length: int) -> bytes:
    content = file.read(length)
    if len(content) < length:
        raise EOFError
    return content


# --- in the child -----------------------------------------------------------------------------------------------------


def receive_request(kind: type[Request]) -> tuple[Request, bytes]:
    """Read one request and its payload. Raises EOFError when there are no more."""
    return _receive(sys.stdin.buffer, kind)


def send_answer(payload: bytes = b"", *, refusal: str = "") -> None:
    """Answer the request that was read last."""
    _send(sys.stdout.buffer, refusal, payload)


def answer_requests(kind: type[Request], answer: Callable[[Request, bytes], bytes]) -> None:
    """Answer requests until there are no more. An InvalidRequest is a refusal."""
    while True:
        try:
            request, payload = receive_request(kind)
        except EOFError:
            return
        try:
            send_answer(answer(request, payload))
        except InvalidRequest as error:
            send_answer(refusal=error.message)


def live_as_child() -> None:
    """Leave to the parent when this process ends: ignore a service manager's signals, and die with the parent."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """End, by this signal, when the thread that started this process has ended, however that was."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(0)  # it ended before the kernel was asked


def limit_memory(num_bytes: int) -> None:
    """Let this process take at most so much memory beyond what it has, and leave no core file."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + num_bytes, in_use + num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
