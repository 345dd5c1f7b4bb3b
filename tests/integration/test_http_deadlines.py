"""The deadlines of a request count from its first byte, also before the engine has heard of it."""

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from roseinfer.messages import Grammar
from roseinfer.records import FinishReason
from roseinfer.text.grammar.checker import GrammarChecker
from roseinfer.text.tokenizer.tokenizer import Tokenizer
from tests.unit.server.harness import Answer, ScriptedEngine, Server, says, serving

SOON_S = 0.1
GIVEN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "the body's whole": ({"timeout_s": SOON_S, "queue_timeout_s": 3600}, {}, "timeout_s"),
    "the body's wait": ({"timeout_s": 3600, "queue_timeout_s": SOON_S}, {}, "queue_timeout_s"),
    "the server's whole": ({}, {"request_timeout_s": SOON_S}, "timeout_s"),
    "the server's wait": ({}, {"queue_timeout_s": SOON_S}, "queue_timeout_s"),
}


class NeverChecked(GrammarChecker):
    """Grammars whose check does not end, and is not yet under way."""

    def __init__(self) -> None:
        self.futures: list[Future[None]] = []
        self.under_way = {}

    def check(self, grammar: Grammar, param: str) -> "Future[None]":
        self.futures.append(Future())
        return self.futures[-1]


async def encode_never(*_: object, **__: object) -> list[list[int]]:
    never: asyncio.Future[list[list[int]]] = asyncio.get_running_loop().create_future()
    return await never


def assert_late(answer: Answer, param: str, server: Server) -> None:
    assert (answer.status, answer.error["code"], answer.error["param"]) == (503, "queue_timeout", param)
    assert int(answer.headers["Retry-After"]) >= 1
    assert server.engine.requests == []
    [timeline] = server.engine.closed
    assert (timeline.finish_reason, timeline.error_code) == (FinishReason.REJECTED, "queue_timeout")


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_passes_while_a_grammar_is_checked(name: str, stream: bool) -> None:
    body, config, param = GIVEN[name]
    async with serving(ScriptedEngine(says("a")), **config) as server:
        checks = server.service.grammar_checker = NeverChecked()
        answer = await server.complete(stream=stream, structured_outputs={"choice": ["a"]}, **body)
        assert_late(answer, param, server)
    assert [future.cancelled() for future in checks.futures] == [True], "no request waits for it: it need not begin"


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("endpoint", ["complete", "chat"])
async def test_a_deadline_passes_while_a_prompt_is_encoded(
    name: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode_prompts", encode_never)
    body, config, param = GIVEN[name]
    async with serving(ScriptedEngine(says("a")), **config) as server:
        ask: Any = server.chat if endpoint == "chat" else server.complete
        assert_late(await ask(**body), param, server)


async def test_a_wait_that_passes_later_is_the_engines_matter() -> None:
    """Only the whole time of a request ends one that the engine has, and it has a moment more."""
    engine = ScriptedEngine()
    async with serving(engine) as server:
        asked = asyncio.create_task(server.complete(queue_timeout_s=SOON_S))
        await engine.received()
        await asyncio.sleep(2 * SOON_S)
        engine.say("a", FinishReason.LENGTH)
        assert (await asked).status == 200
