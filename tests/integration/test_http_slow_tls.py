"""A reader that stalls behind TLS, where two buffers lie one behind the other, is bounded and noticed as any other."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from roseinfer.messages import TokenOutput
from roseinfer.records import Delivery
from roseinfer.server.connection.connection import HIGH_WATER_BYTES, Connection
from roseinfer.server.connection.tls import Certificate
from tests.integration.test_http_connections import HEAD
from tests.integration.test_http_keys import write_certificate
from tests.unit.server.harness import HUGE, HUGE_TEXT, ScriptedEngine, Server, serving


@asynccontextmanager
async def stalled(directory: Path, engine: ScriptedEngine, **config: Any) -> AsyncIterator[tuple[Server, Connection]]:
    """A stream over TLS, and its connection, whose client reads nothing."""
    certificate, key = write_certificate(directory, "here")
    trust = ssl.create_default_context(cafile=certificate)
    async with serving(engine, **config) as server:
        pair = Certificate(Path(certificate), Path(key))
        listener = await server.runner.listen("127.0.0.1", 0, pair)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, listener.sockets[0].getsockname())
        _, writer = await asyncio.open_connection(sock=client, ssl=trust, server_hostname="127.0.0.1")
        body = json.dumps({"prompt": "Hi", "stream": True}).encode()
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await engine.received()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        assert server.runner.server is not None
        [connection] = server.runner.server.connections
        assert isinstance(connection, Connection)
        try:
            yield server, connection
        finally:
            writer.transport.abort()
            listener.close()
            await server.service.wait_idle()


async def test_what_waits_in_both_buffers_is_bounded_and_then_dropped(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with stalled(tmp_path, engine, write_timeout_s=1.5) as (_, connection):
        engine.flood()
        largest = 0
        while not engine.aborted:  # the deadline's doing
            largest = max(largest, connection.num_unsent_bytes)
            await asyncio.sleep(0.01)
    one_write = len(HUGE_TEXT) + 1024
    # What waited for the socket goes to it at once when a quarter of its mark is left, and as much may wait again.
    assert HIGH_WATER_BYTES < largest <= HIGH_WATER_BYTES // 4 + 2 * (HIGH_WATER_BYTES + one_write)
    assert engine.aborted == [engine.requests[0].request_id]


async def test_a_client_is_behind_also_where_only_the_socket_holds_what_it_has_not_read(tmp_path: Path) -> None:
    engine, deliveries = ScriptedEngine(), list[Delivery]()
    async with stalled(tmp_path, engine) as (server, connection):
        server.listener.on_write = lambda _, delivery: deliveries.append(delivery)  # type: ignore[method-assign, assignment]
        while not connection.num_unsent_bytes:
            num_written = len(deliveries)
            engine.tell(TokenOutput(engine.requests[0].request_id, [HUGE]))
            while len(deliveries) == num_written:  # noqa: ASYNC110  # the server's, without an event
                await asyncio.sleep(0.001)
        assert connection.transport is not None
        assert connection.transport.get_write_buffer_size() == 0, "TLS has passed all of it on"
    assert deliveries[-1].was_paused
    assert not deliveries[0].was_paused
