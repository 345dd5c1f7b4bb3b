"""Which deadline a connection has that rests: a head's once one has begun, else that of the next request."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from roseinfer.records import FinishReason
from tests.integration.live_server import closed
from tests.integration.test_http_connections import BODY, HEAD, connected
from tests.unit.server.harness import ScriptedEngine, serving

PROBE = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD_TIMEOUT_S = 0.2
NEVER_S = 3600.0


async def answer_to(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The status and the body of the next answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r")[0]))
    return int(head.split()[1]), body


@pytest.mark.parametrize("path", [b"/nowhere", b"/v1/completions"], ids=["no such path", "not ready"])
async def test_a_body_behind_its_refusal_is_no_head(path: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Some clients send head and body each by itself, and a refusal does not wait for the second."""
    with caplog.at_level(logging.INFO):
        async with (
            serving(ScriptedEngine(), is_ready=False, head_timeout_s=HEAD_TIMEOUT_S, idle_timeout_s=NEVER_S) as server,
            connected(server) as (reader, writer),
        ):
            head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 16\r\n\r\n" % path
            for _ in range(2):
                writer.write(head)
                status, _ = await answer_to(reader)
                assert status in {404, 503}
                for half in (BODY[:7], BODY[7:]):
                    writer.write(half)
                    await asyncio.sleep(2 * HEAD_TIMEOUT_S)
            writer.write(PROBE)
            assert (await answer_to(reader))[0] == 200
    assert "closing a connection" not in caplog.text


async def test_a_head_behind_a_body_that_came_late_has_the_time_of_a_head() -> None:
    async with (
        serving(ScriptedEngine(), head_timeout_s=HEAD_TIMEOUT_S, idle_timeout_s=NEVER_S) as server,
        connected(server) as (reader, writer),
    ):
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 16\r\n\r\n")
        assert (await answer_to(reader))[0] == 404
        writer.write(BODY)
        await asyncio.sleep(HEAD_TIMEOUT_S)
        writer.write(PROBE[:-2])
        assert await closed(reader) == b""


@asynccontextmanager
async def answered_late(behind: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection whose first request was answered long after these bytes had come behind it."""
    engine = ScriptedEngine()
    async with (
        serving(engine, head_timeout_s=HEAD_TIMEOUT_S, idle_timeout_s=NEVER_S) as server,
        connected(server) as (reader, writer),
    ):
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        await engine.received()
        writer.write(behind)
        await asyncio.sleep(3 * HEAD_TIMEOUT_S)
        engine.say("a", FinishReason.LENGTH)
        status, body = await answer_to(reader)
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, "a")
        yield reader, writer


async def test_a_head_that_begins_during_an_answer_has_its_time_from_the_end_of_that() -> None:
    async with answered_late(PROBE[:-2]) as (reader, _):
        assert await closed(reader) == b""


async def test_a_request_that_is_whole_waits_as_long_as_the_answer_before_it_takes() -> None:
    async with answered_late(PROBE) as (reader, writer):
        assert (await answer_to(reader))[0] == 200
        await asyncio.sleep(3 * HEAD_TIMEOUT_S)
        writer.write(PROBE)
        assert (await answer_to(reader))[0] == 200
