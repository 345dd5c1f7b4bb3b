"""Starts, calls, pauses and ends the processes that benchmarks measure. Needs the standard library only, on both ends.

The measured process answers calls: `{"call": name, …arguments}` a line on its standard input, `{"result": …}` or
`{"error": text}` a marked line on its standard output, where libraries print as well. It works only while it has a call
to answer, so several of them can be kept ready and measured in turn (A B A B).
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from roseinfer.bench.definitions import Observed

ROOT = Path(__file__).parents[1]
MARK = "answer: "
REST_S = 0.1
RAISED_NICE = -15  # of a scheduling group; see raise_groups


class PeerFailed(RuntimeError):
    """The measured process ended, or answered with an error."""


def answer(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer calls until standard input ends; the measured process calls this."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            reply = json.dumps({"result": handlers[arguments.pop("call")](**arguments)})
        except Exception as error:  # noqa: BLE001 - the caller gets every error
            traceback.print_exc()
            reply = json.dumps({"error": f"{type(error).__name__}: {error}"})
        replies.write(f"\n{MARK}{reply}\n")  # on a line of its own, whatever was printed before
        replies.flush()


def answered(sent_ns: int, token_ns: Sequence[int]) -> dict[str, Any]:
    """What a process that drives itself answers for a request: fields of an `Observed`, a chunk for each token."""
    stamps = {"intended_ns": sent_ns, "sent_ns": sent_ns, "token_ns": token_ns, "end_ns": token_ns[-1]}
    return {"request_id": "", **stamps, "token_counts": [1] * len(token_ns)}


def family_of(pid: int) -> list[int]:
    """The process and all its descendants, in whatever sessions they are."""
    family, pending = [], [pid]
    while pending:
        family.append(pending.pop())
        for children in Path(f"/proc/{family[-1]}").glob("task/*/children"):
            try:
                pending += map(int, children.read_text().split())
            except OSError:  # that thread has just ended
                continue
    return family


def raise_groups(pid: int) -> bool:
    """Give the sessions of a process and its descendants more weight than others. Returns whether that was permitted.

    Where the kernel groups tasks by session (autogroup), a threaded product whose partner lost its core to another
    session waits a whole slice of the scheduler, and 0.3 ms read as 8 ms. `nice` does not help: it counts only inside
    one session. A member that made itself nicer stays so by as much.
    """
    try:
        for member in family_of(pid):
            nice = os.getpriority(os.PRIO_PROCESS, member)
            Path(f"/proc/{member}/autogroup").write_text(str(RAISED_NICE + max(0, nice)))
    except OSError:
        return False
    return True


def start(command: Sequence[str], log: Path, **options: Any) -> subprocess.Popen[str]:
    """Start a process in a session of its own, in the repository's root; its output goes to the log.

    Its environment is Python's copy, without what this process has set for its own torch.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        output.write(f"\n$ {' '.join(command)}\n")
        output.flush()
        options = {"stdout": output, "env": os.environ, **options}
        options |= {"cwd": ROOT, "start_new_session": True, "stderr": output, "text": True}
        process: subprocess.Popen[str] = subprocess.Popen(command, **options)  # noqa: S603
    raise_groups(process.pid)
    return process


def stop(process: subprocess.Popen[Any], timeout_s: float = 30.0) -> None:
    """End the process and its descendants: by SIGTERM, and after `timeout_s` by SIGKILL."""
    family = family_of(process.pid)
    _signal(family, signal.SIGCONT)
    _signal([process.pid], signal.SIGTERM)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        _signal(family, signal.SIGKILL)
    process.wait()


def run(command: Sequence[str], log: Path, timeout_s: float, **options: Any) -> bool:
    """Run a process, in the end stopped with all that it has started. Returns whether it succeeded in its time."""
    process = start(command, log, **options)
    deadline = time.monotonic() + timeout_s
    try:
        while process.poll() is None and time.monotonic() < deadline:
            raise_groups(process.pid)  # an engine too, whenever its process begins
            time.sleep(REST_S)
        return process.poll() == 0
    finally:
        if process.poll() is None:
            stop(process)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


@contextmanager
def own_session_raised() -> Iterator[bool]:
    """Give this process the weight of the measured ones: a late client would be measured as a late server.

    Yields whether it was permitted. Inside, SIGTERM ends this process as an error does, so that what it has started is
    stopped on the way out.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    group = Path("/proc/self/autogroup")
    before = group.read_text().split()[-1] if group.exists() else ""
    is_raised = raise_groups(os.getpid())
    try:
        yield is_raised
    finally:
        if is_raised:
            group.write_text(before)


class Entrant:
    """A process that is measured: it answers requests, is paused while others do, and ends with its descendants."""

    name: str
    workloads: Sequence[str] = ()  # those that it runs
    process: subprocess.Popen[Any]

    def drive(self, requests: Sequence[Any]) -> "list[Observed]":
        """Raises PeerFailed when it could not answer them all."""
        raise NotImplementedError

    def pause(self) -> None:
        """Stop the process and its descendants, so that they take no time while another is measured.

        They may first end what they are doing: an engine that is stopped in a step takes the pause for the step's time.
        """
        time.sleep(REST_S)
        _signal(family_of(self.process.pid), signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on, with the weight that a measured process has."""
        raise_groups(self.process.pid)
        _signal(family_of(self.process.pid), signal.SIGCONT)

    def peak_rss_mb(self) -> float:
        return peak_rss_mb(self.process.pid)

    def close(self) -> None:
        stop(self.process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Worker(Entrant):
    """A process that answers calls, at the benchmark's end."""

    def __init__(self, name: str, command: Sequence[str], log: Path, workloads: Sequence[str] = ()) -> None:
        self.name, self.workloads = name, workloads
        self._log = log
        self.process = start(command, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def drive(self, requests: Sequence[Any], call: str = "drive") -> "list[Observed]":
        """See Entrant."""
        from roseinfer.bench.definitions import Observed

        return [Observed(**answered) for answered in self.call(call, requests=requests)]

    def call(self, name: str, **arguments: Any) -> Any:
        """Return what the process answers. Raises PeerFailed."""
        self.send(name, **arguments)
        return self.receive(name)

    def send(self, name: str, **arguments: Any) -> None:
        """Send a call without waiting, so that several processes work at once; `receive` must follow.

        Dataclasses are sent as objects of their fields.
        """
        raise_groups(self.process.pid)  # again, since an engine that it has started has a session of its own
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"call": name, **arguments}, default=asdict) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # it has ended, and `receive` says so
            pass

    def receive(self, name: str) -> Any:
        """Return the answer to what was sent. Raises PeerFailed."""
        assert self.process.stdout is not None
        line = next((line for line in self.process.stdout if line.startswith(MARK)), "")
        if not line:
            raise PeerFailed(f"{self.name} ended at `{name}`; see {self._log}")
        reply = json.loads(line.removeprefix(MARK))
        if "error" in reply:
            raise PeerFailed(f"{self.name}: {reply['error']}; see {self._log}")
        return reply["result"]

    def close(self) -> None:
        self.resume()
        if self.process.stdin is not None:
            try:
                self.process.stdin.close()  # it has no more to answer, and ends
                self.process.wait(10)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                pass
        super().close()
        if self.process.stdout is not None:
            self.process.stdout.close()


def peak_rss_mb(pid: int) -> float:
    """Sum of the peak resident sizes (VmHWM) of a process and its descendants, in 10**6 bytes.

    Pages that two processes share count twice, and the peaks need not have been at one moment: an upper bound.
    """
    return family_mb(pid, "status", "VmHWM")


def family_mb(pid: int, file: str, field: str) -> float:
    """Sum of a field of a file in /proc over a process and its descendants, in 10**6 bytes."""
    total_kib = 0
    for member in family_of(pid):
        with suppress(OSError):  # it has just ended
            lines = Path(f"/proc/{member}/{file}").read_text().splitlines()
            total_kib += sum(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
    return total_kib * 1024 / 1e6
