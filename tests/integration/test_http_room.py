"""What long bodies hold is bounded for all requests together, counted to the end of the answer, and given back."""

import asyncio
import gc
import io
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from roseinfer.records import FinishReason
from tests.integration.test_http_connections import connected
from tests.unit.server.harness import HUGE, HUGE_TEXT, Answer, ScriptedEngine, Server, says, serving

LONG = "x" * 700_000
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def assert_refused(answer: Answer) -> None:
    assert (answer.status, answer.error["code"]) == (429, "overloaded")
    assert int(answer.headers["Retry-After"]) >= 1


async def ask(server: Server, **body: Any) -> Answer:
    return await server.complete(user=LONG, **body)


async def test_long_bodies_are_held_to_the_end_of_their_answers_and_short_ones_do_not_count() -> None:
    engine = ScriptedEngine()
    async with serving(engine, max_bodies_mib=1) as server:
        first = asyncio.create_task(ask(server, stream=True))
        await engine.received()
        assert server.service.body_budget.num_bytes > len(LONG)
        assert_refused(await ask(server))
        engine.reply = says("a")
        assert (await server.complete()).status == 200
        engine.say("b", FinishReason.LENGTH)
        assert (await first).events[-1] == "[DONE]"
        assert (await ask(server)).status == 200
        assert server.service.body_budget.num_bytes == 0


async def test_one_that_is_alone_may_be_longer_than_all_together() -> None:
    async with serving(ScriptedEngine(says("a")), max_bodies_mib=1) as server:
        body = io.BytesIO(json.dumps({"prompt": "Hi", "user": 2 * LONG}).encode())
        headers = {"Content-Type": "application/json"}
        assert (await server.request("POST", "/v1/completions", data=body, headers=headers)).status == 200


@pytest.mark.parametrize("head", [b"Content-Length: 900000\r\n", b"Transfer-Encoding: chunked\r\n"])
async def test_a_body_counts_while_it_comes_and_no_longer_than_its_client_is_there(head: bytes) -> None:
    async with serving(ScriptedEngine(says("a")), max_bodies_mib=1) as server:
        async with connected(server) as (_, writer):
            piece = LONG.encode()
            writer.write(HEAD + head + b"\r\n" + (b"%x\r\n" % len(piece) if b"chunked" in head else b"") + piece)
            while server.service.body_budget.num_bytes < len(LONG):  # noqa: ASYNC110  # the server's, without an event
                await asyncio.sleep(0.01)
            assert_refused(await ask(server))
        while server.service.body_budget.num_bytes:  # noqa: ASYNC110  # the same
            await asyncio.sleep(0.01)
        assert (await ask(server)).status == 200


async def test_what_was_declared_and_has_not_come_is_not_held() -> None:
    async with serving(ScriptedEngine(says("a")), max_bodies_mib=1) as server, AsyncExitStack() as stack:
        for _ in range(8):
            _, writer = await stack.enter_async_context(connected(server))
            writer.write(HEAD + b"Content-Length: 900000\r\n\r\n")
        while len(server.engine.opened) < 8:  # noqa: ASYNC110  # their heads have been read
            await asyncio.sleep(0.01)
        assert (await ask(server)).status == 200
        assert server.service.body_budget.num_bytes == 0


async def test_a_body_that_comes_in_chunks_is_refused_where_the_room_ends() -> None:
    engine = ScriptedEngine()
    async with serving(engine, max_bodies_mib=1) as server, connected(server) as (reader, writer):
        first = asyncio.create_task(ask(server, stream=True))
        await engine.received()
        piece = LONG.encode()
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(piece) + piece)
        assert b" 429 " in await reader.readline()
        engine.say("b", FinishReason.LENGTH)
        await first


async def test_what_tokenize_may_answer_counts_too() -> None:
    engine = ScriptedEngine()
    async with serving(engine, max_bodies_mib=1) as server:

        async def tokenize(**body: Any) -> Answer:
            return await server.request("POST", "/tokenize", json={"prompt": "y" * 60_000, **body})

        alone = await tokenize(return_token_strs=True)
        assert json.loads(alone.body)["token_strs"] == ["y"] * 60_000
        first = asyncio.create_task(server.complete(user="x" * 300_000, stream=True))
        await engine.received()
        assert (await tokenize()).status == 200
        assert_refused(await tokenize(return_token_strs=True))
        engine.say("b", FinishReason.LENGTH)
        await first
        assert server.service.body_budget.num_bytes == 0


async def detokenize(server: Server, *token_ids: int) -> Answer:
    return await server.request("POST", "/detokenize", json={"tokens": token_ids})


async def test_what_detokenize_answers_is_held_until_its_client_has_read_it() -> None:
    """A body of a kilobyte may have an answer of many megabytes."""
    num_tokens = 400
    async with serving(ScriptedEngine(says("a")), max_bodies_mib=1) as server:
        async with connected(server) as (reader, writer):
            body = json.dumps({"tokens": [HUGE] * num_tokens}).encode()
            head = HEAD.replace(b"/v1/completions", b"/detokenize") + b"Content-Length: %d\r\n\r\n" % len(body)
            writer.write(head + body)
            assert b" 200 " in await reader.readline()
            assert server.service.body_budget.num_bytes == len(HUGE_TEXT) * num_tokens + len('{"prompt":""}')
            assert_refused(await detokenize(server, HUGE, HUGE))
            assert (await detokenize(server, *b"short")).json == {"prompt": "short"}
            writer.transport.abort()
        while server.service.body_budget.num_bytes:  # noqa: ASYNC110  # the server's, without an event
            await asyncio.sleep(0.01)
        assert (await detokenize(server, HUGE, HUGE)).json == {"prompt": HUGE_TEXT * 2}
        assert server.service.body_budget.num_bytes == 0


@pytest.fixture
def traced() -> Iterator[None]:
    """Memory is counted, and what refers to itself stays in it."""
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


@pytest.mark.usefixtures("traced")
async def test_a_body_that_stopped_coming_is_not_kept_with_its_refusal() -> None:
    num_bytes = 500_000

    async def stall(server: Server) -> None:
        async with connected(server) as (reader, writer):
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % (num_bytes + 1) + b" " * num_bytes)
            assert b" 408 " in await reader.readline()
            writer.transport.abort()

    async with serving(ScriptedEngine(says("a")), body_timeout_s=0.3) as server:
        await stall(server)
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(4):
            await stall(server)
        after, _ = tracemalloc.get_traced_memory()
    assert after - before < num_bytes


@pytest.mark.usefixtures("traced")
async def test_an_answer_that_finds_no_room_is_not_kept_with_its_refusal() -> None:
    engine = ScriptedEngine()
    async with serving(engine, max_bodies_mib=1) as server:
        first = asyncio.create_task(ask(server, stream=True))
        await engine.received()
        assert_refused(await detokenize(server, *[HUGE] * 40))
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(5):
            assert_refused(await detokenize(server, *[HUGE] * 40))
        after, _ = tracemalloc.get_traced_memory()
        engine.say("b", FinishReason.LENGTH)
        await first
    assert after - before < len(HUGE_TEXT) * 40
