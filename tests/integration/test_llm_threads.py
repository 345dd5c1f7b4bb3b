"""Several threads and one `LLM`: they do not disturb each other, and when it is closed all are told and none waits."""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from roseinfer.engine.link.client import AsyncEngine
from roseinfer.errors import EngineDead
from roseinfer.llm.llm import LLM
from roseinfer.llm.streams import Stream
from roseinfer.messages import Grammar
from roseinfer.records import FinishReason, RequestTimeline
from roseinfer.text.tokenizer.tokenizer import INLINE_CHARS
from tests.background import in_background
from tests.integration.fake_llm import greedy, use_fake_engine, write_tokenizer

LONG = "x" * (INLINE_CHARS + 1)  # a thread encodes it


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[AsyncEngine]:
    write_tokenizer(tmp_path)
    return use_fake_engine(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.encode(LONG),
        lambda llm: llm.submit(LONG, greedy(5)),
        lambda llm: llm.generate(["short", LONG], greedy(5)),
    ],
    ids=["encode", "submit", "generate"],
)
def test_a_request_that_waits_for_the_tokenizer_hears_of_the_end(
    ask: Callable[[LLM], object], engines: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(max_inflight=1)
    has_begun, is_closed = threading.Event(), threading.Event()

    def encode(*_: object) -> list[tokenizers.Encoding]:
        has_begun.set()
        assert is_closed.wait(30)
        return []

    monkeypatch.setattr(llm.tokenizer, "_encode_batches", encode)
    asked = in_background(lambda: ask(llm))
    assert has_begun.wait(10)
    llm.close()
    is_closed.set()
    with pytest.raises(EngineDead, match="was stopped"):
        asked.result(10)


def test_a_request_that_waits_for_its_grammar_hears_of_the_end(
    engines: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, is_asked = LLM(), threading.Event()

    def check(*_: object) -> "Future[None]":
        is_asked.set()
        return Future()

    monkeypatch.setattr(llm._checker, "check", check)
    asked = in_background(lambda: llm.submit("Hello", greedy(5, grammar=Grammar("regex", "a"))))
    assert is_asked.wait(10)
    llm.close()
    with pytest.raises(EngineDead, match="was stopped"):
        asked.result(10)


@pytest.mark.parametrize("attempt", range(10))
@pytest.mark.parametrize("tokenize_workers", [0, 1])
def test_whatever_threads_do_while_it_closes_they_hear_of_it(
    tokenize_workers: int, attempt: int, engines: list[AsyncEngine]
) -> None:
    """They ask without a rest. What was begun ends with abort, and what comes later is refused."""
    llm = LLM(tokenize_workers=tokenize_workers)
    params = greedy(3)
    asks: list[Callable[[], object]] = [
        lambda: llm.encode("Hello"),
        lambda: llm.result(llm.submit("Hello", params)).finish_reason,
        lambda: llm.result(llm.submit([1, 2], params)).finish_reason,
        lambda: [done.finish_reason for done in llm.generate(["Hello"] * 2, params)],
        lambda: llm.abort(llm.submit("Hello", params)),
    ]
    have_begun = threading.Barrier(len(asks) + 1)

    def ask_until_the_end(ask: Callable[[], object]) -> set[str]:
        told = set[str]()
        have_begun.wait(10)
        try:
            while True:
                told.add(str(ask()))
        except EngineDead:
            return told

    askers = [in_background(lambda ask=ask: ask_until_the_end(ask)) for ask in asks]  # type: ignore[misc]
    have_begun.wait(10)
    time.sleep(attempt / 500)
    llm.close()
    told = [asker.result(10) for asker in askers]
    assert told[1] | told[2] <= {FinishReason.LENGTH, FinishReason.ABORT}


def test_a_second_close_leaves_the_first_alone(engines: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a signal's handler closes what a `with` is closing."""
    llm = LLM()
    close, num_ended = engines[0].close, 0

    async def close_twice() -> None:
        nonlocal num_ended
        in_background(llm.close).result(10)
        await close()
        num_ended += 1

    monkeypatch.setattr(engines[0], "close", close_twice)
    in_background(llm.close).result(30)
    llm.close()
    assert num_ended == 1


def test_threads_that_submit_at_once_have_ids_of_their_own(engines: list[AsyncEngine]) -> None:
    interval = sys.getswitchinterval()
    with LLM() as llm:
        sys.setswitchinterval(1e-6)
        try:
            given = [in_background(lambda: [llm.submit([1], greedy(1)) for _ in range(200)]) for _ in range(4)]
            ids = [request_id for each in given for request_id in each.result(30)]
        finally:
            sys.setswitchinterval(interval)
        assert len(set(ids)) == len(ids)
        for request_id in ids:
            llm.abort(request_id)


def test_a_timeline_is_found_while_its_request_leaves(
    engines: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread looks at the moment when the stream is forgotten."""
    found: list[RequestTimeline] = []

    class Watched(dict[str, Stream]):
        def pop(self, request_id: str, *default: Any) -> Any:
            stream = super().pop(request_id, *default)
            found.append(in_background(lambda: llm.timeline(request_id)).result(10))
            return stream

    with LLM() as llm:
        monkeypatch.setattr(llm._streams, "_streams", Watched())
        timeline = llm.result(llm.submit("Hello", greedy(2))).timeline
        assert found == [timeline]
