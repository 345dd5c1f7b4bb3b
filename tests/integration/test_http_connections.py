"""Clients that send slowly, read slowly, come in crowds or speak no HTTP cost the server a bounded amount of time."""

import asyncio
import json
import logging
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast

import pytest
from aiohttp import http_parser

from roseinfer.config.options import ServerConfig
from roseinfer.errors import ConfigError
from roseinfer.records import FinishReason
from roseinfer.server.connection.connection import (
    LEAST_CONNECTIONS,
    MAX_HEADERS,
    RESERVED_CONNECTIONS,
    RESERVED_FOR_PEER,
    SPARE_DESCRIPTORS,
    Connection,
    Connections,
    require_compiled_parser,
)
from roseinfer.server.openapi import document
from tests.integration.live_server import closed, live
from tests.unit.engine.harness import make_engine
from tests.unit.server.harness import HUGE_TEXT, ScriptedEngine, Server, engine_info, says, serving

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "Hi"}'
HIGH_WATER_BYTES = 64 * 1024  # asyncio's: a write that leaves more in the buffer waits


@asynccontextmanager
async def connected(
    server: Server, own_address: str = "127.0.0.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, local_addr=(own_address, 0))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def dribble(writer: asyncio.StreamWriter) -> None:
    while not writer.transport.is_closing():
        writer.write(b"a")
        await asyncio.sleep(0.02)


async def test_heads_that_dribble_are_cut_and_nobody_else_notices() -> None:
    async with serving(ScriptedEngine(says("a")), head_timeout_s=0.3) as server, AsyncExitStack() as stack:
        ends = []
        for start in (b"GET /", b"GET /version HTTP/1.1\r\nX-Slow: "):
            for _ in range(20):
                reader, writer = await stack.enter_async_context(connected(server))
                writer.write(start)
                task = asyncio.create_task(dribble(writer))
                stack.callback(task.cancel)
                ends.append(closed(reader))
        assert (await server.complete()).status == 200
        assert await asyncio.gather(*ends) == [b""] * 40
        assert (await server.get("/livez")).status == 200
    assert server.engine.opened == server.engine.closed


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with serving(ScriptedEngine(), head_timeout_s=0.2) as server, connected(server) as (reader, _):
        assert await closed(reader) == b""


async def test_a_body_that_dribbles_is_answered_408() -> None:
    async with serving(ScriptedEngine(says("a")), body_timeout_s=0.2) as server, connected(server) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 99\r\n\r\n{")
        task = asyncio.create_task(dribble(writer))
        head = await reader.readuntil(b"\r\n\r\n")
        task.cancel()
        body = json.loads(await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r")[0])))
    assert b" 408 " in head
    assert body["error"]["code"] == "body_timeout"
    assert server.engine.requests == []
    assert server.engine.closed[0].error_code == "body_timeout"


async def test_a_connection_rests_as_long_as_it_may() -> None:
    async with (
        serving(ScriptedEngine(says("a")), idle_timeout_s=0.3, head_timeout_s=30) as server,
        connected(server) as (reader, writer),
    ):
        for _ in range(2):
            writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in await reader.readline()
            await reader.readuntil(b"}")
        assert await closed(reader) == b""


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_reader_that_stalls_loses_its_request_and_no_other(stream: bool) -> None:
    engine = ScriptedEngine()
    async with serving(engine, write_timeout_s=0.4, max_inflight=2) as server, connected(server) as (_, writer):
        payload = json.dumps({"prompt": "Hi", "stream": stream}).encode()
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
        await engine.received()
        engine.flood()
        if not stream:
            engine.say("", FinishReason.LENGTH)
        engine.reply = says("quick")
        assert (await server.complete()).status == 200
        await server.service.wait_idle()
    timeline = next(timeline for timeline in engine.closed if timeline.request_id == engine.requests[0].request_id)
    if stream:
        assert engine.aborted == [timeline.request_id]
        assert timeline.client_disconnected


async def test_what_a_reader_that_stalls_has_not_read_is_bounded_and_then_dropped() -> None:
    """15 MB are due to it: the server encodes what its buffer takes, and the rest stays as the engine's few words."""
    engine = ScriptedEngine()
    async with serving(engine, write_timeout_s=1.5) as server, connected(server) as (_, writer):
        payload = json.dumps({"prompt": "Hi", "stream": True}).encode()
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
        await engine.received()
        assert server.runner.server is not None
        [connection] = server.runner.server.connections
        engine.flood()
        largest = 0
        while not engine.aborted:  # the deadline's doing
            if connection.transport is not None:
                largest = max(largest, connection.transport.get_write_buffer_size())
            await asyncio.sleep(0.01)
        await server.service.wait_idle()
    bound = 2 * HIGH_WATER_BYTES + len(HUGE_TEXT) + 1024  # what fits in the buffer, until aiohttp looks, one write more
    assert HIGH_WATER_BYTES < largest <= bound
    assert engine.aborted == [engine.requests[0].request_id]


async def test_a_slow_reader_that_reads_is_left_alone() -> None:
    engine = ScriptedEngine()
    async with (
        serving(engine, write_timeout_s=1.0, idle_timeout_s=1.0) as server,
        connected(server) as (reader, writer),
    ):
        payload = json.dumps({"prompt": "Hi", "stream": True}).encode()
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
        await engine.received()
        engine.flood()
        engine.say("z", FinishReason.LENGTH)
        size = 0
        while piece := await reader.read(1 << 18):
            size += len(piece)
            if b"[DONE]" in piece:
                break
            await asyncio.sleep(0.02)
    assert size > 15_000_000
    assert engine.aborted == []


async def test_more_connections_than_the_cap_are_closed_at_once_and_the_rest_are_served() -> None:
    async with (
        serving(ScriptedEngine(says("a")), least_connections=10, max_inflight=1) as server,
        AsyncExitStack() as stack,
    ):
        held = [await stack.enter_async_context(connected(server, f"127.0.0.{1 + i % 2}")) for i in range(10)]
        async with connected(server, "127.0.0.2") as (reader, _):
            assert await closed(reader) == b""
        kubelet = [await stack.enter_async_context(connected(server, "127.0.0.3")) for _ in range(RESERVED_FOR_PEER)]
        async with connected(server, "127.0.0.3") as (reader, _):
            assert await closed(reader) == b""
        for reader, writer in kubelet:  # beyond the cap
            writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in await reader.readline()
        many = [f"127.0.0.{4 + i}" for i in range(RESERVED_CONNECTIONS - RESERVED_FOR_PEER)]
        for address in many:
            await stack.enter_async_context(connected(server, address))
        async with connected(server, "127.0.1.1") as (reader, _):
            assert await closed(reader) == b"", "what is reserved is taken"
        reader, writer = held[3]
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await reader.readline()
        held[0][1].close()
        while (await server_takes(server)) is False:
            pass


async def server_takes(server: Server) -> bool:
    async with connected(server) as (reader, writer):
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        try:
            return b" 200 " in await reader.readline()
        except ConnectionResetError:
            return False


async def test_one_address_cannot_take_them_all() -> None:
    async with serving(ScriptedEngine(), least_connections=8, max_inflight=1) as server, AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(connected(server))
        reader, _ = await stack.enter_async_context(connected(server))
        assert await closed(reader) == b""
        with socket.create_connection(("127.0.0.1", server.port), source_address=("127.0.0.2", 0)) as other:
            other.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(other, b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in await loop.sock_recv(other, 100)


async def test_three_hundred_idle_sockets_are_no_matter() -> None:
    async with serving(ScriptedEngine(says("a"))) as server, AsyncExitStack() as stack:
        for _ in range(300):
            await stack.enter_async_context(connected(server))
        assert (await server.complete()).status == 200


ODD_HEADS = {
    "no http": (b"hello\r\n\r\n", 400, "malformed_request"),
    "a tls hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "malformed_request"),
    "a method of controls": (b"G\x01T / HTTP/1.1\r\nHost: x\r\n\r\n", 400, "malformed_request"),
    "a bad version": (b"GET / HTTP/9.9.9\r\nHost: x\r\n\r\n", 400, "malformed_request"),
    "a header without a colon": (b"GET / HTTP/1.1\r\nHost: x\r\nbroken\r\n\r\n", 400, "malformed_request"),
    "a null in a header": (b"GET / HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n", 400, "malformed_request"),
    "a folded header": (b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n", 400, "malformed_request"),
    "two hosts": (b"GET /version HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400, "malformed_request"),
    "an absolute target": (b"GET http://127.0.0.1/version HTTP/1.1\r\nHost: x\r\n\r\n", 400, "malformed_request"),
    "two lengths": (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400, "malformed_request"),
    "length and chunks": (
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
        "malformed_request",
    ),
    "a negative length": (HEAD + b"Content-Length: -2\r\n\r\n{}", 400, "malformed_request"),
    "a length of words": (HEAD + b"Content-Length: many\r\n\r\n{}", 400, "malformed_request"),
    "an expectation": (HEAD + b"Expect: a miracle\r\nContent-Length: 2\r\n\r\n{}", 417, "malformed_request"),
    "a long target": (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, "head_too_large"),
    "a long header": (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 20_000 + b"\r\n\r\n", 431, "head_too_large"),
    "many headers": (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 500 + b"\r\n", 431, "head_too_large"),
    "one header too many": (
        b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * MAX_HEADERS + b"\r\n",
        431,
        "head_too_large",
    ),
    "a bad chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nnot a length\r\n", 400, "malformed_request"),
    "a compressed body": (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 9\r\n\r\n", 415, "unsupported_media_type"),
    "a chunked transfer, compressed": (
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        400,
        "malformed_request",
    ),
}


@pytest.mark.parametrize("name", ODD_HEADS)
async def test_an_odd_head_gets_the_error_object(name: str, caplog: pytest.LogCaptureFixture) -> None:
    content, status, code = ODD_HEADS[name]
    with caplog.at_level(logging.INFO):
        async with serving(ScriptedEngine(says("a"))) as server, connected(server) as (reader, writer):
            writer.write(content)
            head = await reader.readuntil(b"\r\n\r\n")
            body = json.loads(await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r")[0])))
    assert int(head.split()[1]) == status
    assert body["error"]["code"] == code
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "b'" not in body["error"]["message"], "nothing of what was sent is sent back"
    assert server.engine.requests == []
    assert b"aiohttp" not in head
    request_id = head.partition(b"X-Request-Id: ")[2].partition(b"\r")[0].decode()
    assert request_id in {vars(record).get("request_id") for record in caplog.records}
    assert not [record for record in caplog.records if record.exc_info], "a client's mistake is no traceback"


async def test_an_expectation_that_is_not_met_is_answered_under_the_id_that_the_client_gave() -> None:
    async with serving(ScriptedEngine()) as server, connected(server) as (reader, writer):
        writer.write(HEAD + b"Expect: a miracle\r\nX-Request-Id: find-me\r\nContent-Length: 2\r\n\r\n{}")
        assert b"\r\nX-Request-Id: find-me\r\n" in await reader.readuntil(b"\r\n\r\n")


def test_what_an_odd_head_gets_is_in_the_document() -> None:
    told = {str(status) for _, status, _ in ODD_HEADS.values()} - {"415"}  # which is of a body
    for methods in document(("scripted",), engine_info(), has_keys=False)["paths"].values():
        for operation in methods.values():
            assert told <= operation["responses"].keys(), operation["operationId"]


async def test_as_many_headers_as_a_head_may_have_are_read() -> None:
    async with serving(ScriptedEngine()) as server, connected(server) as (reader, writer):
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * (MAX_HEADERS - 1) + b"\r\n")
        assert b" 200 " in await reader.readline()


async def test_half_closed_after_the_request_is_answered_whole_or_closed() -> None:
    async with serving(ScriptedEngine(says("abc"))) as server, connected(server) as (reader, writer):
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        writer.write_eof()
        content = await closed(reader)
        await server.service.wait_idle()
    assert content == b"" or b'"text":"abc"' in content


async def test_a_stream_in_http_1_0_ends_with_its_connection_whatever_the_client_asked_for() -> None:
    body = b'{"prompt": "Hi", "stream": true}'
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Connection: keep-alive\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with serving(ScriptedEngine(says("ab"))) as server, connected(server) as (reader, writer):
        writer.write(head + body)
        async with asyncio.timeout(5):
            answer = await reader.read()
    assert answer.endswith(b"data: [DONE]\n\n")


async def test_the_connections_are_ours() -> None:
    async with serving(ScriptedEngine()) as server, connected(server) as (reader, writer):
        runner = server.runner
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"}")
        assert runner.server is not None
        assert [type(connection) for connection in runner.server.connections] == [Connection]
        assert len(runner.connections) == 1
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await reader.read()
        assert len(runner.connections) == 0


def test_without_the_compiled_parser_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiled_parser()
    monkeypatch.setattr(http_parser, "HttpRequestParser", http_parser.HttpRequestParserPy)
    with pytest.raises(ConfigError, match="compiled"):
        require_compiled_parser()


@pytest.mark.parametrize(
    ("limits", "num_connections", "raised"),
    [
        ((100, 100), 100 - SPARE_DESCRIPTORS, (100, 100)),
        ((100, 200), 200 - SPARE_DESCRIPTORS, (200, 200)),
        ((1024, 1 << 20), LEAST_CONNECTIONS, (LEAST_CONNECTIONS + SPARE_DESCRIPTORS, 1 << 20)),
        ((1024, resource.RLIM_INFINITY), LEAST_CONNECTIONS, (LEAST_CONNECTIONS + SPARE_DESCRIPTORS, -1)),
        ((1 << 20, 1 << 20), LEAST_CONNECTIONS, None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), LEAST_CONNECTIONS, None),
    ],
)
def test_as_many_connections_as_descriptors_can_be_had(
    limits: tuple[int, int],
    num_connections: int,
    raised: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: calls.append(given))
    assert Connections(ServerConfig(max_inflight=1), lambda _: None).max_connections == num_connections
    assert calls == ([] if raised is None else [raised])


def test_one_address_has_half_of_the_connections_where_descriptors_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    class FromOneAddress:
        peer = "192.0.2.1"

    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    connections = Connections(ServerConfig(), lambda _: None)
    entered = [connections.enter(cast(Connection, FromOneAddress())) for _ in range(100)]
    assert sum(entered) == connections.max_connections // 2 == (100 - SPARE_DESCRIPTORS) // 2


async def test_a_burst_of_six_hundred_streams_is_served_by_default() -> None:
    async with live(lambda: make_engine(num_blocks=512, max_num_seqs=16, max_num_batched_tokens=256)) as server:
        server.start(600, max_tokens=2)
        await server.until(lambda: len(server.tape.finished) == 600)
    assert {timeline.finish_reason for timeline in server.tape.finished} == {FinishReason.LENGTH}
