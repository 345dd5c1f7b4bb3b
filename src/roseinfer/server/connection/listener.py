"""Listens at a port for an application, with bounded connections, over TLS where there is a certificate.

asyncio makes the protocol of a TLS connection when its handshake is over. `Handshake` lets it count, and its deadline
run, from when it is accepted.
"""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from roseinfer.errors import UnmetExpectation
from roseinfer.runtime.passage import Passage
from roseinfer.server.connection.connection import (
    LONGEST_CHECK_S,
    MAX_HEADERS,
    MAX_LINE_BYTES,
    Connection,
    Connections,
)
from roseinfer.server.connection.scraping import Passed, Scrape, Scraping, Sorting
from roseinfer.server.connection.tls import Certificate
from roseinfer.server.exchange import HEAD_NS
from roseinfer.server.port import Port

MAX_BACKLOG = 1024  # connections not accepted yet, and as many are accepted in a turn of the event loop
LINGER_S = 5.0  # for the rest of a body that was refused: closing at once would take the answer away with it

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Handshake(asyncio.Protocol):
    """A socket whose TLS handshake is not over; its connection takes over then."""

    def __init__(self, connection: Connection, context: ssl.SSLContext, timeout_s: float) -> None:
        self._connection = connection
        self._context = context
        self._timeout_s = timeout_s
        self._shaking: asyncio.Task[None] | None = None
        self._early = b""  # what came with the handshake's last bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if self._connection.enter(transport):
            transport.pause_reading()  # until TLS reads it
            self._shaking = asyncio.get_running_loop().create_task(self._shake(transport))

    def connection_lost(self, _: BaseException | None) -> None:
        """The client left before the handshake, which `start_tls` would wait for all the same."""
        self._connection.leave()
        if self._shaking is not None:
            self._shaking.cancel()

    def data_received(self, data: bytes) -> None:
        self._early += data

    async def _shake(self, transport: asyncio.Transport) -> None:
        connection, secured = self._connection, None
        with contextlib.suppress(OSError):  # ssl.SSLError, and the end of the handshake's time, are some
            secured = await asyncio.get_running_loop().start_tls(
                transport, self, self._context, server_side=True, ssl_handshake_timeout=self._timeout_s
            )
        if secured is None:  # refused, overdue, or the client has gone
            connection.leave()
            return
        # What the socket's own buffer does not take is too much: asyncio would keep half a megabyte of it here.
        secured.set_write_buffer_limits(high=1, low=0)
        secured.set_protocol(connection)
        connection.connection_made(secured)
        if self._early:
            connection.data_received(self._early)


class ConnectionServer(web.Server):
    """aiohttp's factory of protocols, making bounded connections."""

    def __init__(self, connections: Connections, handle: Handle, options: dict[str, Any], **server_options: Any):
        super().__init__(_answering(handle), **server_options)
        self._open = connections
        self._options = options

    def __call__(self) -> Connection:
        return Connection(self._open, self, **self._options)


class Listener(web.AppRunner):
    """An application, and the ports at which it listens."""

    def __init__(
        self,
        app: web.Application,
        port: Port,
        shutdown_timeout_s: float,
        scrape: Scrape | None = None,
        passage: Passage | None = None,
    ) -> None:
        """Scrapers are answered by `scrape`, or else go through the passage, where there is no TLS."""
        super().__init__(app, shutdown_timeout=shutdown_timeout_s)
        config = port.config
        self.connections = Connections(config, port.observer.on_refusal)
        self._port, self._scrape, self._passage = port, scrape, passage
        self._adopting: set[asyncio.Task[None]] = set()
        app.cleanup_ctx.append(self.connections.watching)
        self._options: dict[str, Any] = {
            "auto_decompress": False,  # compressed bodies are refused; a bomb must not go off before that
            "access_log": None,  # ours carries the request id
            "keepalive_timeout": config.idle_timeout_s + LONGEST_CHECK_S,  # ours, unless we are late
            "lingering_time": LINGER_S,
            "max_line_size": MAX_LINE_BYTES,
            "max_field_size": MAX_LINE_BYTES,
            "max_headers": MAX_HEADERS,
        }

    async def _make_server(self) -> web.Server:
        """Called by `setup`. Not public in aiohttp; checked with 3.14.5."""
        server = await super()._make_server()
        return ConnectionServer(
            self.connections,
            server.request_handler,
            self._options,
            request_factory=server.request_factory,
            handler_cancellation=True,  # a client that goes away cancels its handler, which aborts its sequences
        )

    async def setup(self) -> None:
        await super().setup()
        if self._passage is not None:
            self._passage.open(self._adopt)

    def _adopt(self, passed: socket.socket, data: bytes) -> None:
        task = asyncio.get_running_loop().create_task(self._go_on_with(passed, data))
        self._adopting.add(task)
        task.add_done_callback(self._adopting.discard)

    async def _go_on_with(self, passed: socket.socket, data: bytes) -> None:
        """Go on with a connection that another process has accepted."""
        connection = self._connection()
        protocol: asyncio.Protocol = connection
        if self._scrape is not None:
            protocol = Scraping(connection, self._port, self._scrape, self._passage)
        with contextlib.suppress(OSError):  # the client has gone
            await asyncio.get_running_loop().connect_accepted_socket(lambda: Passed(protocol, data), passed)

    async def listen(self, host: str, port: int, certificate: Certificate | None) -> asyncio.Server:
        """Accept connections from now on, by TLS with a certificate. Raises OSError or UnicodeError.

        The caller closes what it returns.
        """
        accept = self._accept(certificate)
        return await asyncio.get_running_loop().create_server(accept, host, port, backlog=MAX_BACKLOG)

    async def listen_at(self, listening: socket.socket) -> asyncio.Server:
        """Accept the connections of a socket that listens already. The caller closes what it returns."""
        accept = self._accept(None)
        return await asyncio.get_running_loop().create_server(accept, sock=listening, backlog=MAX_BACKLOG)

    def _accept(self, certificate: Certificate | None) -> Callable[[], asyncio.Protocol]:
        def accept() -> asyncio.Protocol:
            connection = self._connection()
            if certificate is not None:
                return Handshake(connection, certificate.context, self.connections.handshake_timeout_s)
            if self._scrape is not None:
                return Scraping(connection, self._port, self._scrape)
            return connection if self._passage is None else Sorting(connection, self._port, self._passage)

        return accept

    def _connection(self) -> Connection:
        assert isinstance(self.server, ConnectionServer), "listen before setup"
        return self.server()


async def bind(host: str, port: int) -> list[socket.socket]:
    """Returns sockets that listen at a host's addresses, for another process. Raises OSError or UnicodeError."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
    with contextlib.closing(server):
        sockets = [socket.socket(fileno=os.dup(bound.fileno())) for bound in server.sockets]
    for listening in sockets:
        listening.listen(MAX_BACKLOG)
    return sockets


def _answering(handle: Handle) -> Handle:
    """The handler, between the calls that let its connection note the beginning and the end of a request.

    The header Expect is judged here because aiohttp does so before any middleware, and fails at one that is no UTF-8.
    """

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, Connection)
        request[HEAD_NS] = connection.head_ns
        connection.begin(request.content)
        try:
            if request.headers.get("Expect", "100-continue").lower() != "100-continue":
                return connection.refuse(request, UnmetExpectation("No such expectation can be met.", param="Expect"))
            response = await handle(request)
            if request.content.exception() is not None:
                response.force_close()  # where the next request begins is not known
            return response
        finally:
            connection.end()

    return answer
