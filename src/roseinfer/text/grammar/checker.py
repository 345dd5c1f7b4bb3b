"""Checks that a client's grammar compiles, in a process of its own with a deadline and a limit on memory.

A grammar is a program that a stranger sends. Whatever it does to the library, overflow a stack, take all memory or
never end, happens to a child that is replaced, and the client gets a 400. Nothing is written to disk (CVE-2025-29770),
and the verdicts that are remembered are bounded in bytes (CVE-2025-32381).
"""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from roseinfer.config.options import StructuredConfig
from roseinfer.errors import InvalidRequest, NotReady, Overloaded
from roseinfer.messages import EngineInfo, Grammar
from roseinfer.runtime.child_process import (
    ChildProcess,
    answer_requests,
    limit_memory,
    receive_request,
    send_answer,
)
from roseinfer.text.grammar.source import GrammarCache, check_bounds, check_types

MAX_WAITING = 32  # checks that wait for their turn; most take a millisecond
START_TIMEOUT_S = 60.0  # of the child, which reads the vocabulary first
VERDICT_CACHE_BYTES = 8 << 20
COMPILE_MEMORY_BYTES = 512 << 20  # ten times what the largest schema takes that compiles in time
_VERDICT_BYTES = 512  # beside its texts
_LEAST = Grammar("regex", "")  # in the place of any text: whether the vocabulary can be used at all
_NICER_BY = 5  # levels of nice(2): its imports and a stranger's grammar wait for the streams


class Setup(msgspec.Struct, frozen=True):
    """The first request to the child: what it needs before it can check anything."""

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
        self._child = ChildProcess("roseinfer.text.grammar.checker", niceness=_NICER_BY, stderr=subprocess.DEVNULL)
        self._verdicts = GrammarCache(VERDICT_CACHE_BYTES, _num_bytes)  # what is wrong; empty when nothing is
        self._remembering = threading.Lock()  # of the verdicts, which `check` and the thread use
        self.under_way: dict[Grammar, asyncio.Future[None]] = {}  # by `check_form`
        self._unusable = ""  # why no grammar can be used with this vocabulary, once a child has said so

    def check(self, grammar: Grammar, param: str) -> "Future[None]":
        """Raises Overloaded at once, and then or from the future InvalidRequest that names the field `param`.

        The future may raise NotReady too. A grammar whose verdict is remembered waits for no other.
        """
        check_types(grammar, param)
        is_free = grammar.kind == "text" and not grammar.source and grammar.thought is not None
        asked = _LEAST if is_free else msgspec.structs.replace(grammar, thought=None)
        if (verdict := self._remembered(asked)) is not None:
            if verdict:
                raise _refusal(verdict, param)
            known: Future[None] = Future()
            known.set_result(None)
            return known
        if not self._places.acquire(blocking=False):
            raise Overloaded(f"{MAX_WAITING} grammars wait to be checked already.")
        future = self._thread.submit(self._check, asked, param)
        future.add_done_callback(lambda _: self._places.release())
        return future

    def close(self) -> None:
        """End the child, and with it the check under way. Idempotent."""
        self._child.close()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _remembered(self, grammar: Grammar) -> str | None:
        with self._remembering:
            return self._verdicts.get(grammar)

    def _check(self, grammar: Grammar, param: str) -> None:
        check_bounds(grammar, param)
        verdict = self._remembered(grammar)
        if verdict is None:
            verdict, is_lasting = self._ask(grammar)
            if is_lasting:
                with self._remembering:
                    self._verdicts.put(grammar, verdict)
        if verdict:
            raise _refusal(verdict, param)

    def _ask(self, grammar: Grammar) -> tuple[str, bool]:
        """What is wrong with the grammar, empty when nothing is; and whether it will be wrong another time.

        That a child was slow, or ended, may be due to the machine, or to the grammars before. Raises NotReady.
        """
        process = self._child.process
        if process is not None and process.poll() is not None:  # while it had nothing to do: no grammar's fault
            self._child.end()
        if not self._unusable and self._child.process is None:
            self._set_up()
        if self._unusable:
            return self._unusable, False
        timeout_s = self._config.compile_timeout_s
        try:
            return self._child.request(grammar, timeout_s=timeout_s).refusal, True
        except TimeoutError:
            return f"The grammar takes more than {timeout_s:g} s to compile.", False
        except EOFError:
            return "The grammar is too large or too complex to compile.", False

    def _set_up(self) -> None:
        """Start a child that reads the vocabulary; one that it cannot use is not read again.

        Raises NotReady for a child that ended or was silent, or where the engine is not known yet or any more.
        """
        info = self._info()
        setup = Setup(info.checkpoint_dir, info.vocab_size, info.eos_token_ids, COMPILE_MEMORY_BYTES)
        try:
            problem = self._child.request(setup, timeout_s=START_TIMEOUT_S).refusal
        except (EOFError, TimeoutError):
            raise NotReady("Grammars cannot be checked: the process that does it ended while it started.") from None
        if problem:
            self._child.end()
            self._unusable = f"Grammars cannot be used with this model's vocabulary: {problem}."


async def check_form(form: tuple[Grammar, str] | None, checker: GrammarChecker | None) -> None:
    """Check a grammar, if one is asked for. Raises InvalidRequest that names its field, Overloaded or NotReady."""
    if form is None:
        return
    grammar, param = form
    if checker is None:
        raise InvalidRequest(f"`{param}`: this server has no grammars.", param=param)
    check_types(grammar, param)
    if (earlier := checker.under_way.get(grammar)) is not None:  # of a burst with one grammar, one takes a place
        await asyncio.wait([earlier])
        await asyncio.wrap_future(checker.check(grammar, param))
        return
    check = checker.under_way[grammar] = asyncio.wrap_future(checker.check(grammar, param))
    try:
        await check
    finally:
        del checker.under_way[grammar]


def _refusal(verdict: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"`{param}`: {verdict}", param=param)


def _num_bytes(grammar: Grammar, verdict: str) -> int:
    """That a remembered verdict takes; a text of odd characters takes four for each."""
    return _VERDICT_BYTES + sys.getsizeof(grammar.source) + sys.getsizeof(verdict)


def main() -> None:
    """The child: reads the vocabulary, then answers for each grammar what is wrong with it."""
    from roseinfer.text.grammar.compiler import Vocabulary  # which the parent never imports

    setup, _ = receive_request(Setup)
    try:
        vocabulary = Vocabulary.load(Path(setup.checkpoint_dir), setup.vocab_size, setup.eos_token_ids)
    except ValueError as error:  # a file that cannot be read may be there another time, so an OSError ends the child
        send_answer(refusal=str(error))
        return

    def compile_grammar(grammar: Grammar, _: bytes) -> bytes:
        vocabulary.compile(grammar)
        return b""

    limit_memory(setup.memory_bytes)
    send_answer()
    answer_requests(Grammar, compile_grammar)


if __name__ == "__main__":
    main()
