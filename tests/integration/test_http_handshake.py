"""A connection counts, and its deadline runs, from when it was accepted: not only from the end of its TLS handshake."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from roseinfer.server.connection import connection
from tests.integration.live_server import closed
from tests.integration.test_http_keys import running, write_certificate

REQUEST = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
NEVER_S = 3600.0
SCRAP = b"\x16\x03\x01\x02\x00"  # the beginning of a handshake


class Secured(NamedTuple):
    port: int
    trust: ssl.SSLContext


@asynccontextmanager
async def secured(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    head_timeout_s: float,
    max_connections: int = 100,
    **server: Any,
) -> AsyncIterator[Secured]:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", head_timeout_s)
    monkeypatch.setattr(connection, "LEAST_CONNECTIONS", max_connections)
    monkeypatch.setattr(connection, "CONNECTIONS_PER_REQUEST", 0)
    certificate, key = write_certificate(directory, "here")
    async with running(directory, monkeypatch, tls_cert_file=certificate, tls_key_file=key, **server) as url:
        yield Secured(int(url.rpartition(":")[2]), ssl.create_default_context(cafile=certificate))


@asynccontextmanager
async def silent(port: int, said: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    """A client that connects and says no more than this."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    try:
        yield reader
    finally:
        writer.transport.abort()


async def is_served(server: Secured) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=server.trust)
    except OSError:
        return False
    writer.write(REQUEST)
    status = await reader.readline()
    writer.transport.abort()
    return b" 200 " in status


@pytest.mark.parametrize("said", [b"", SCRAP], ids=["nothing", "a scrap"])
async def test_who_never_shakes_hands_has_the_time_of_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    async with (
        secured(tmp_path, monkeypatch, head_timeout_s=0.2, max_connections=1) as server,
        silent(server.port, said) as reader,
    ):
        assert await closed(reader) == b""
        while not await is_served(server):  # the place is free again
            pass


async def test_handshakes_that_are_not_over_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        secured(tmp_path, monkeypatch, head_timeout_s=NEVER_S, max_connections=6) as server,
        AsyncExitStack() as stack,
    ):
        held = AsyncExitStack()
        for _ in range(3):
            await held.enter_async_context(silent(server.port))
        assert await closed(await stack.enter_async_context(silent(server.port))) == b""
        assert not await is_served(server)
        await held.aclose()
        while not await is_served(server):
            pass


async def test_a_handshake_may_take_as_long_as_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not asyncio's minute."""
    loop, allowed_s = asyncio.get_running_loop(), list[float]()
    start_tls = loop.start_tls

    async def noting(*arguments: Any, ssl_handshake_timeout: float, **options: Any) -> asyncio.Transport | None:
        allowed_s.append(ssl_handshake_timeout)
        return await start_tls(*arguments, ssl_handshake_timeout=ssl_handshake_timeout, **options)

    monkeypatch.setattr(loop, "start_tls", noting)
    async with secured(tmp_path, monkeypatch, head_timeout_s=NEVER_S) as server:
        assert await is_served(server)
    assert allowed_s == [NEVER_S]


async def test_a_refused_handshake_gives_its_place_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with secured(tmp_path, monkeypatch, head_timeout_s=NEVER_S, max_connections=1) as server:
        async with silent(server.port, REQUEST) as reader:  # no TLS at all
            await closed(reader)
        while not await is_served(server):
            pass


async def test_a_request_that_comes_with_the_handshake_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send its part of the handshake's end and its first request at once."""
    async with secured(tmp_path, monkeypatch, head_timeout_s=NEVER_S) as server:
        assert b" 200 " in await asyncio.to_thread(_ask_at_once, server)


def _ask_at_once(server: Secured) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = server.trust.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                incoming.write(connection.recv(1 << 16))
        client.write(REQUEST)
        connection.sendall(outgoing.read())  # both
        while True:
            try:
                return client.read(1 << 16)
            except ssl.SSLWantReadError:
                incoming.write(connection.recv(1 << 16))
