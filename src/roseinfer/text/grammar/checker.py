"""Says whether a client's grammar compiles, in a process of its own with a deadline and a limit on memory.

A grammar is a program that a stranger sends. Whatever it does to the library, overflow a stack, take all memory or
never end, happens to a child that is replaced, and the client gets a 400. Nothing is written to disk (CVE-2025-29770),
and the verdicts that are remembered are bounded in bytes (CVE-2025-32381). Knows no HTTP and no engine.
"""

import contextlib
import os
import resource
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec

from roseinfer.config.tree import StructuredConfig
from roseinfer.errors import InvalidRequest, NotReady, Overloaded
from roseinfer.messages import EngineInfo, Grammar
from roseinfer.runtime.child_process import start_nicer_child
from roseinfer.text.grammar.bounds import check_bounds

MAX_WAITING = 32  # checks that wait for their turn; most take a millisecond
START_TIMEOUT_S = 60.0  # of the child, which reads the vocabulary first
VERDICT_CACHE_BYTES = 8 << 20
_VERDICT_BYTES = 512  # beside its texts
_HEADER_BYTES = 4
_NICER_BY = 5  # levels of nice(2): its imports and a stranger's grammar wait for the streams
_PATIENCE = 5  # times that a deadline may take on the clock, where the child got no processor
_LEAST_WAIT_S = 0.01  # the system counts no finer


class Setup(msgspec.Struct, frozen=True):
    """What the child must know before it can check anything."""

    checkpoint_dir: str
    vocab_size: int
    eos_token_ids: list[int]
    memory_bytes: int  # beyond what it takes with the vocabulary read


class GrammarChecker:
    """One child, started when it is first needed and again when it died, and one thread that talks to it."""

    def __init__(self, config: StructuredConfig, info: Callable[[], EngineInfo]) -> None:
        self._config = config
        self._info = info
        self._thread = ThreadPoolExecutor(1, "grammar-check")
        self._places = threading.BoundedSemaphore(MAX_WAITING)
        self._child: subprocess.Popen[bytes] | None = None
        self._verdicts: OrderedDict[Grammar, str] = OrderedDict()  # what is wrong with it; empty when nothing is
        self._num_verdict_bytes = 0
        self._unusable = ""  # why no grammar can be used with this vocabulary, once a child has told
        self._is_closed = False

    def check(self, grammar: Grammar, param: str) -> "Future[None]":
        """Raises Overloaded at once, and from the future InvalidRequest that names the field `param`, or NotReady."""
        if not self._places.acquire(blocking=False):
            raise Overloaded(f"{MAX_WAITING} grammars wait to be checked already.")
        future = self._thread.submit(self._check, grammar, param)
        future.add_done_callback(lambda _: self._places.release())
        return future

    def close(self) -> None:
        """End the child, and with it the check under way. Idempotent."""
        self._is_closed = True
        if self._child is not None:
            self._child.kill()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._stop()

    def _check(self, grammar: Grammar, param: str) -> None:
        check_bounds(grammar, param)
        verdict = self._verdicts.get(grammar)
        if verdict is None:
            verdict, is_lasting = self._ask(grammar)
            if is_lasting:
                self._remember(grammar, verdict)
        else:
            self._verdicts.move_to_end(grammar)
        if verdict:
            raise InvalidRequest(f"`{param}`: {verdict}", param=param)

    def _remember(self, grammar: Grammar, verdict: str) -> None:
        self._verdicts[grammar] = verdict
        self._num_verdict_bytes += _num_bytes(grammar, verdict)
        while self._num_verdict_bytes > VERDICT_CACHE_BYTES:
            self._num_verdict_bytes -= _num_bytes(*self._verdicts.popitem(last=False))

    def _ask(self, grammar: Grammar) -> tuple[str, bool]:
        """What is wrong with the grammar, empty when nothing is; and whether it will be wrong another time.

        That a child was slow, or ended, may be due to the machine, or to the grammars before. Raises NotReady.
        """
        child = None if self._unusable else self._child or self._start()
        if child is None:
            return self._unusable, False
        try:
            answer = self._exchange(child, msgspec.msgpack.encode(grammar), self._config.compile_timeout_s)
        except TimeoutError:
            self._stop()
            return f"The grammar takes more than {self._config.compile_timeout_s:g} s to compile.", False
        except (EOFError, BrokenPipeError):
            self._stop()
            return "The grammar is too large or too complex to compile.", False
        return answer.decode(), True

    def _start(self) -> "subprocess.Popen[bytes] | None":
        """None where the child told that it can do nothing with the vocabulary: another would tell the same.

        Raises NotReady for one that ended without a word, or was silent, which may be due to the machine; and when the
        server is shutting down, or does not know its engine.
        """
        if self._is_closed:
            raise NotReady("The server is shutting down.")
        info = self._info()  # before there is a child, which would be left without its setup
        child = self._child = start_nicer_child("roseinfer.text.grammar.checker", _NICER_BY, subprocess.DEVNULL)
        setup = Setup(info.checkpoint_dir, info.vocab_size, info.eos_token_ids, self._config.compile_memory_mib << 20)
        try:
            told = self._exchange(child, msgspec.msgpack.encode(setup), START_TIMEOUT_S).decode()
        except (EOFError, BrokenPipeError, TimeoutError):
            self._stop()
            raise NotReady("Grammars cannot be checked: the process that does it ended while it started.") from None
        if told:
            self._stop()
            self._unusable = f"Grammars cannot be used with this model's vocabulary: {told}."
            return None
        return child

    def _exchange(self, child: "subprocess.Popen[bytes]", message: bytes, timeout_s: float) -> bytes:
        """Raises TimeoutError, EOFError or BrokenPipeError. The time is the child's own: others may have the cores."""
        assert child.stdin is not None
        assert child.stdout is not None
        poller = select.poll()  # not select(), which knows no descriptor above 1023
        poller.register(child.stdout, select.POLLIN)
        used_before_s, gives_up_at_s = _processor_s(child.pid), time.monotonic() + _PATIENCE * timeout_s
        _send(child.stdin, message)
        left_s = timeout_s
        while left_s > 0 and time.monotonic() < gives_up_at_s:
            if poller.poll(max(left_s, _LEAST_WAIT_S) * 1e3):
                return _receive(child.stdout)
            left_s = timeout_s - (_processor_s(child.pid) - used_before_s)
        raise TimeoutError

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            with contextlib.suppress(BrokenPipeError):  # of what it had not read
                self._child.communicate()
            self._child = None


def _processor_s(pid: int) -> float:
    """What a process has computed so far, in seconds of a core; 0 for one that is no more, as its pipe will say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _num_bytes(grammar: Grammar, verdict: str) -> int:
    """That a remembered verdict takes; a text of odd characters takes four for each."""
    return _VERDICT_BYTES + sys.getsizeof(grammar.source) + sys.getsizeof(verdict)


def _send(file: IO[bytes], message: bytes) -> None:
    file.write(len(message).to_bytes(_HEADER_BYTES, "little") + message)
    file.flush()


def _receive(file: IO[bytes]) -> bytes:
    header = file.read(_HEADER_BYTES)
    message = file.read(int.from_bytes(header, "little"))
    if len(header) < _HEADER_BYTES or len(message) < int.from_bytes(header, "little"):
        raise EOFError
    return message


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """The child: the vocabulary first, then what is wrong with each grammar, until there are no more."""
    from roseinfer.text.grammar.library import Vocabulary  # which the parent never imports

    setup = msgspec.msgpack.decode(_receive(requests), type=Setup)
    try:
        vocabulary = Vocabulary.load(Path(setup.checkpoint_dir), setup.vocab_size, setup.eos_token_ids)
    except ValueError as error:  # a file that cannot be read may be there another time, so that ends us without a word
        _send(answers, str(error).encode())
        return
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = in_use + setup.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _send(answers, b"")
    while True:
        try:
            grammar = msgspec.msgpack.decode(_receive(requests), type=Grammar)
        except EOFError:
            return
        try:
            vocabulary.compile(grammar)
        except InvalidRequest as error:
            _send(answers, error.message.encode())
        else:
            _send(answers, b"")


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
