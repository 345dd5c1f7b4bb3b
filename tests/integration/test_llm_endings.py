"""How an `LLM` ends, and what ends in it: nothing is left behind, and whoever waits is told why."""

import re
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from roseinfer.engine.client import AsyncEngine
from roseinfer.errors import EngineDead, EngineError, RequestTimeout, SequenceFailed
from roseinfer.llm import LLM
from roseinfer.messages import Request, TokenOutput
from roseinfer.records import FinishReason, RequestTimeline
from tests.integration.fake_llm import greedy, until, use_fake_engine, write_tokenizer


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[AsyncEngine]:
    write_tokenizer(tmp_path)
    return use_fake_engine(monkeypatch, tmp_path, latency_s=0.002)


@pytest.fixture
def llm(engines: list[AsyncEngine]) -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


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
    llm._loop.call_soon_threadsafe(engines[0]._on_death, "the engine's process has ended")
    with pytest.raises(EngineDead, match="has ended"):
        list(stream)
    for request_id in ids[1:]:
        with pytest.raises(EngineDead):
            llm.result(request_id)
    assert {llm.timeline(request_id).finish_reason for request_id in ids} == {FinishReason.ERROR}
    with pytest.raises(EngineDead):
        llm.result(llm.submit("Hello", greedy(1)))


@pytest.mark.parametrize(
    ("reason", "error"), [(FinishReason.ERROR, SequenceFailed), (FinishReason.TIMEOUT, RequestTimeout)]
)
def test_a_request_that_the_engine_could_not_finish_is_an_error(
    reason: FinishReason, error: type[EngineError], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = AsyncEngine.generate

    async def generate_in_vain(
        engine: AsyncEngine, requests: Sequence[Request], timelines: Sequence[RequestTimeline]
    ) -> AsyncGenerator[list[TokenOutput], None]:
        async with aclosing(generate(engine, requests, timelines)) as steps:
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
