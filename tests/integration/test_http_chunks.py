"""A body whose framing breaks after its head was read: one answer, at once, and the connection is closed behind it."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from roseinfer.records import FinishReason
from tests.integration.live_server import closed
from tests.integration.test_http_connections import BODY, HEAD, connected
from tests.integration.test_http_idle import NEVER_S, answer_to
from tests.unit.server.harness import ScriptedEngine, Server, serving

CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BROKEN = b"not a length\r\n"


@asynccontextmanager
async def patient(engine: ScriptedEngine) -> AsyncIterator[Server]:
    """A server that closes nothing for being late."""
    async with serving(
        engine, body_timeout_s=NEVER_S, head_timeout_s=NEVER_S, idle_timeout_s=NEVER_S, write_timeout_s=NEVER_S
    ) as server:
        yield server


def assert_refused(answer: tuple[int, bytes]) -> None:
    status, body = answer
    assert (status, json.loads(body)["error"]["code"]) == (400, "malformed_request")


@pytest.mark.parametrize("before", [b"", b"3\r\n{  \r\n"], ids=["first", "second"])
@pytest.mark.parametrize("after", [b"", b"0\r\n\r\n" + CHUNKED], ids=["nothing more", "and more"])
async def test_a_bad_chunk_behind_the_head_is_refused_at_once(
    before: bytes, after: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with patient(ScriptedEngine()) as server, connected(server) as (reader, writer):
            writer.write(CHUNKED + before)
            while not server.engine.opened:  # noqa: ASYNC110  # its head has been read
                await asyncio.sleep(0.01)
            writer.write(BROKEN + after)
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r")[0]))
            assert_refused((int(head.split()[1]), body))
            assert b"\r\nConnection: close\r\n" in head
            assert await closed(reader) == b"", "one request has one answer"
    assert not [record for record in caplog.records if record.exc_info], "a client's mistake is no traceback"
    assert [timeline.error_code for timeline in server.engine.closed] == ["malformed_request"]


@pytest.mark.parametrize("pieces", [(CHUNKED, BROKEN), (CHUNKED + b"3\r\n{  \r\n", BROKEN), (b"hello\r\n\r\n",)])
async def test_one_behind_another_request_is_refused_behind_its_answer(pieces: tuple[bytes, ...]) -> None:
    engine = ScriptedEngine()
    async with patient(engine) as server, connected(server) as (reader, writer):
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        await engine.received()
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.05)
        engine.say("a", FinishReason.LENGTH)
        assert (await answer_to(reader))[0] == 200
        assert_refused(await answer_to(reader))
        assert await closed(reader) == b""


async def test_a_bad_chunk_behind_a_refusal_closes_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with patient(ScriptedEngine()) as server, connected(server) as (reader, writer):
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert (await answer_to(reader))[0] == 404
        writer.write(BROKEN)
        assert await closed(reader) == b""
    assert not [record for record in caplog.records if record.exc_info]
