"""How an `LLM` ends, and what ends in it: nothing is left behind, and each waiting caller gets the reason."""

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
import tokenizers

from roseinfer.engine.link.client import AsyncEngine
from roseinfer.errors import EngineDead, EngineError, RequestTimeout, SequenceFailed
from roseinfer.llm.llm import LLM
from roseinfer.llm.streams import Stream
from roseinfer.messages import Grammar, Request, TokenOutput
from roseinfer.records import FinishReason, RequestTimeline
from roseinfer.text.choice import Choice
from roseinfer.text.generation import Generation
from roseinfer.text.tokenizer.tokenizer import LONG_CHARS
from tests.integration.fake_llm import greedy, until, use_fake_engine, write_tokenizer


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[AsyncEngine]:
    write_tokenizer(tmp_path)
    return use_fake_engine(monkeypatch, tmp_path, latency_s=0.002)


@pytest.fixture
def llm(engines: list[AsyncEngine]) -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


def num_driven(llm: LLM) -> int:
    """Calls of `LLM._drive` and `LLM._drive_text` that have not ended."""
    return sum("LLM._drive" in repr(task.get_coro()) for task in asyncio.all_tasks(llm._loop._loop))


def test_close_ends_streams_joins_threads_and_may_be_called_twice(engines: list[AsyncEngine]) -> None:
    before = set(threading.enumerate())
    llm = LLM()
    request_id = llm.submit("Hello", greedy(120))
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.extend(llm.stream(request_id)))
    reader.start()
    until(lambda: bool(received))
    llm.close()
    reader.join(10)
    assert not reader.is_alive()
    assert llm.timeline(request_id).finish_reason is FinishReason.ABORT
    until(lambda: set(threading.enumerate()) <= before)
    llm.close()


PROGRAMS = {
    "never closed": "llm = LLM(); print(len(llm.generate(['a'])))",
    "let go": "print(len(LLM().generate(['a']))); import gc; gc.collect()",
    "closed by a forked child": """
import multiprocessing
llm = LLM()
child = multiprocessing.get_context("fork").Process(target=llm.close)
child.start(); child.join(30)
assert child.exitcode == 0
print(len(llm.generate(["a"])))
""",
    "used by a forked child": """
import os, signal
from roseinfer import SamplingParams
from roseinfer.errors import EngineDead
llm = LLM()
request_id = llm.submit([1], SamplingParams(max_tokens=900, ignore_eos=True))
def is_refused(call):
    try: call()
    except EngineDead as error: return "forked" in error.message
if not (child := os.fork()):
    signal.alarm(60)  # it would wait for ever
    is_refused(lambda: list(llm.stream(request_id)))  # unless it has ended before
    os._exit(not all(map(is_refused, (lambda: llm.generate(["a"]), lambda: llm.encode("a"), lambda: llm.submit([1])))))
assert os.waitpid(child, 0)[1] == 0
assert len(llm.result(request_id).token_ids) == 900
print(len(llm.generate(["a"])))
""",
    "asked by an observer": """
from roseinfer.records import Observer
class Asking(Observer):
    def on_finish(self, timeline):
        for call in () if refused else (lambda: llm.encode("a"), lambda: llm.generate([[1]]), llm.close):
            try: call()
            except RuntimeError: refused.append(call)
refused = []
llm = LLM(observers=[Asking()])
print(len(llm.generate(["a"])))
assert len(refused) == 3
""",
    "used while Python ends": """
import atexit
from roseinfer.errors import EngineDead
llm = LLM()
def late():
    try: llm.generate(["a"])
    except EngineDead: print(1)
atexit.register(late)
""",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_that_closes_nothing_ends_in_silence(program: str) -> None:
    """With the engine in a process of its own, which ends too: it holds the other end of the pipe."""
    source = f"from roseinfer import LLM\n{program}"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_calls_after_close_are_refused(engines: list[AsyncEngine]) -> None:
    llm = LLM()
    llm.close()
    for call in (
        lambda: llm.submit("Hello"),
        lambda: llm.submit([1, 2]),
        lambda: llm.submit("Hello", greedy(5, grammar=Grammar("regex", "a"))),
        lambda: llm.generate(["Hello"]),
        lambda: llm.generate([[1, 2]]),
        lambda: llm.encode("Hello"),
    ):
        with pytest.raises(EngineDead, match="was stopped"):
            call()
    llm.abort("nobody")


def test_close_aborts_what_is_being_tokenised(engines: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer is closed when it is not needed any more: what its threads do then is no error."""
    llm = LLM(tokenize_workers=1)
    tokenizer, has_begun, is_closed = llm.tokenizer, threading.Event(), threading.Event()
    close = tokenizer.close

    def encode(*_: object) -> list[tokenizers.Encoding]:
        has_begun.set()
        assert is_closed.wait(10)
        return []

    def close_and_wait() -> None:
        close()
        is_closed.set()
        until(lambda: timeline.finish_reason is not None)

    monkeypatch.setattr(tokenizer, "_encode_batches", encode)
    monkeypatch.setattr(tokenizer, "close", close_and_wait)
    request_id = llm.submit("x" * (LONG_CHARS + 1), greedy(5))
    timeline = llm.timeline(request_id)
    assert has_begun.wait(10)
    llm.close()
    assert (list(llm.stream(request_id)), timeline.finish_reason) == ([], FinishReason.ABORT)


def test_calls_while_it_closes_are_refused(engines: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tokenize_workers=1, max_inflight=1)
    close, told = llm.tokenizer.close, list[str]()

    def submit_and_close() -> None:
        for _ in range(2):  # the first leaves its place
            with pytest.raises(EngineDead) as caught:
                llm.submit("Hello", greedy(5))
            told.append(caught.value.message)
        close()

    monkeypatch.setattr(llm.tokenizer, "close", submit_and_close)
    llm.close()
    assert told == ["The engine was stopped."] * 2


def test_a_start_that_fails_leaves_no_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_fake_engine(monkeypatch, tmp_path)  # a directory without a tokenizer
    before = set(threading.enumerate())
    with pytest.raises(Exception, match=re.escape("tokenizer.json")):
        LLM()
    until(lambda: set(threading.enumerate()) <= before)


def test_a_dead_engine_ends_every_stream_with_an_error(llm: LLM, engines: list[AsyncEngine]) -> None:
    ids = [llm.submit("Hello", greedy(100)) for _ in range(3)]
    stream = llm.stream(ids[0])
    next(stream)
    llm._loop.post(engines[0]._go_down, EngineDead("the engine's process has ended"))
    with pytest.raises(EngineDead, match="has ended"):
        list(stream)
    for request_id in ids[1:]:
        with pytest.raises(EngineDead):
            llm.result(request_id)
    assert {llm.timeline(request_id).finish_reason for request_id in ids} == {FinishReason.ERROR}
    with pytest.raises(EngineDead):
        llm.result(llm.submit("Hello", greedy(1)))


def test_an_unforeseen_error_reaches_its_own_request_alone(
    engines: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_output = Choice.add_output

    def add_or_fail(choice: Choice, output: TokenOutput) -> None:
        if choice.timeline.num_prompt_tokens == 7 and choice.num_tokens == 3:
            raise ZeroDivisionError("a mistake of ours")
        add_output(choice, output)

    monkeypatch.setattr(Choice, "add_output", add_or_fail)
    with LLM(max_inflight=3) as llm:
        hit, other, read = (llm.submit(prompt, greedy(20)) for prompt in ("seven..", "others", "seven.."))
        for wait in (lambda: llm.result(hit), lambda: list(llm.stream(read))):
            with pytest.raises(EngineError, match="unforeseen ZeroDivisionError") as caught:
                wait()
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
            assert "a mistake of ours" in str(caught.value.__cause__)
        assert len(llm.result(other).token_ids) == 20
        for request_id in (hit, read):
            timeline = llm.timeline(request_id)
            assert (timeline.finish_reason, timeline.error_code) == (FinishReason.ERROR, "engine_error")
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            llm.generate(["seven..", "others", "more"], greedy(20))
        until(lambda: engines[0].num_unfinished == 0)
        again = [llm.submit("others", greedy(2)) for _ in range(3)]  # every place came back
        assert [len(llm.result(request_id).token_ids) for request_id in again] == [2, 2, 2]
        until(lambda: not num_driven(llm))


def test_an_unexpected_error_is_logged_after_all_streams_have_ended(
    engines: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    route = LLM._route

    def route_and_fail(llm: LLM, stream: Stream, generation: Generation, output: TokenOutput) -> None:
        route(llm, stream, generation, output)
        if stream.is_finished:
            raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(LLM, "_route", route_and_fail)
    with LLM() as llm:
        assert len(llm.result(llm.submit("Hello", greedy(3))).token_ids) == 3
        until(lambda: not num_driven(llm))
    [record] = caplog.records
    assert (record.name, record.levelname) == ("roseinfer.llm.streams", "ERROR")
    assert "a mistake of ours" in caplog.text


def test_an_unforeseen_error_before_the_engine_reaches_its_request(
    engines: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tokenize_workers=1) as llm:

        async def encode_in_vain(*_: object, **__: object) -> list[list[int]]:
            raise MemoryError

        monkeypatch.setattr(llm.tokenizer, "encode", encode_in_vain)
        with pytest.raises(EngineError, match="unforeseen MemoryError"):
            list(llm.stream_tokens(llm.submit("Hello", greedy(2))))


def test_every_thread_that_waits_for_one_request_sees_its_end(llm: LLM) -> None:
    request_id = llm.submit("Hello", greedy(20))
    streams = [llm.stream_tokens(request_id) for _ in range(3)]
    received: list[list[int]] = []
    readers = [threading.Thread(target=lambda stream=stream: received.extend(stream)) for stream in streams]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(10)
        assert not reader.is_alive()
    assert sum(map(len, received)) == 20, "each piece was given once"


@pytest.mark.parametrize(
    ("reason", "error"), [(FinishReason.ERROR, SequenceFailed), (FinishReason.TIMEOUT, RequestTimeout)]
)
def test_a_request_that_the_engine_could_not_finish_is_an_error(
    reason: FinishReason, error: type[EngineError], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = AsyncEngine.generate

    async def generate_in_vain(
        engine: AsyncEngine, requests: Sequence[Request], timelines: Sequence[RequestTimeline], **how: bool
    ) -> AsyncGenerator[list[TokenOutput], None]:
        async with aclosing(generate(engine, requests, timelines, **how)) as steps:
            async for outputs in steps:
                yield [msgspec.structs.replace(out, finish_reason=out.finish_reason and reason) for out in outputs]

    monkeypatch.setattr(AsyncEngine, "generate", generate_in_vain)
    request_id = llm.submit("Hello", greedy(110))
    assert next(iter(llm.stream_tokens(request_id))), "what it had is told"
    request_id = llm.submit("Hello", greedy(5))
    with pytest.raises(error):
        llm.result(request_id)
    assert llm.timeline(request_id).error_code == error.code
    monkeypatch.undo()
