"""A client that goes away: streamed or not, queued or running, its sequences are aborted at once (defect D8)."""

import asyncio
import json
import socket
from typing import Any

import pytest

from roseinfer.records import FinishReason
from tests.unit.server.harness import ScriptedEngine, Server, says, serving

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


async def send(server: Server, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request on a connection of its own, which the test can break."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    payload = json.dumps({"prompt": "Hi"} | body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
    )
    writer.write(head.encode() + b"\r\n\r\n" + payload)
    return reader, writer


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as a crashed client or an impatient balancer does."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.close()


@pytest.mark.parametrize("is_reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("is_running", [False, True], ids=["queued", "running"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_it_aborts_what_it_asked_for(stream: bool, is_running: bool, is_reset: bool) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as server:
        reader, writer = await send(server, stream=stream, n=2)
        await engine.received(2)
        if is_running:
            engine.say("a")
            if stream:
                await reader.readuntil(b'"text":"a"')
        reset(writer) if is_reset else writer.close()
        await server.service.wait_idle()
        assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
        engine.reply = says("still here")
        assert (await server.complete()).json["choices"][0]["text"] == "still here"
    gone = engine.closed[:2]
    assert [timeline.finish_reason for timeline in gone] == [FinishReason.ABORT] * 2
    assert all(timeline.client_disconnected for timeline in gone)
    assert not engine.closed[2].client_disconnected


async def test_only_what_has_not_finished_is_aborted() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as server:
        reader, writer = await send(server, stream=True, n=2)
        await engine.received(2)
        engine.say("a", FinishReason.LENGTH, index=0)
        await reader.readuntil(b'"length"')
        writer.close()
        await server.service.wait_idle()
    assert engine.aborted == [engine.requests[1].request_id]
    reasons = {timeline.request_id: timeline.finish_reason for timeline in engine.closed}
    assert [reasons[request.request_id] for request in engine.requests] == [FinishReason.LENGTH, FinishReason.ABORT]


async def test_in_the_middle_of_its_body() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HEAD + b"Content-Length: 99\r\n\r\n{")
        while not engine.opened:
            await server.get("/livez")
        writer.close()
        await server.service.wait_idle()
    assert engine.requests == []
    [timeline] = engine.closed
    assert (timeline.finish_reason, timeline.client_disconnected) == (FinishReason.ABORT, True)


async def test_its_id_can_be_used_again_at_once() -> None:
    """The engine may not have heard of the abort yet, and must not get the same id twice."""
    engine = ScriptedEngine()
    headers = {"x-request-id": "again"}
    async with serving(engine) as server:
        task = asyncio.create_task(server.complete(headers=headers))
        await engine.received()
        task.cancel()
        await asyncio.wait({task})
        await server.service.wait_idle()
        engine.reply = says("a")
        answer = await server.complete(headers=headers)
    assert answer.headers["x-request-id"] == "again"
    first, second = (request.request_id for request in engine.requests)
    assert first == "again"
    assert second.startswith("again~")


async def test_a_slow_reader_delays_no_other_client() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as server:
        _, writer = await send(server, stream=True)
        await engine.received()
        engine.flood()
        engine.reply = says("quick")
        assert (await server.complete()).status == 200
        reset(writer)
        await server.service.wait_idle()
    assert engine.aborted == [engine.requests[0].request_id]
