"""Turns an application into a port that listens, whose connections are guarded. Knows no routes.

asyncio tells a protocol of a connection with TLS when its handshake is over; with `Handshake` it counts, and its
deadline runs, from when it was accepted.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from roseinfer.config.tree import ServerConfig
from roseinfer.errors import UnmetExpectation
from roseinfer.server.connection.connection import LONGEST_CHECK_S, MAX_HEADERS, MAX_LINE_BYTES, Connection, Guard
from roseinfer.server.connection.tls import Certificate

LINGER_S = 5.0  # for the rest of a body that was refused: closing at once would take the answer away with it

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Handshake(asyncio.Protocol):
    """A socket that is to speak TLS, in the place of its connection until it does."""

    def __init__(self, connection: Connection, context: ssl.SSLContext, timeout_s: float) -> None:
        self._connection = connection
        self._context = context
        self._timeout_s = timeout_s
        self._shaking: asyncio.Task[None] | None = None
        self._early = b""  # what came with the handshake's last bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if self._connection.enter(transport):
            transport.pause_reading()  # until there is somebody to understand it
            self._shaking = asyncio.get_running_loop().create_task(self._shake(transport))

    def connection_lost(self, _: BaseException | None) -> None:
        """Before the handshake began; `start_tls` would wait for it all the same."""
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


class GuardedServer(web.Server):
    """aiohttp's factory of protocols, making guarded ones."""

    def __init__(self, guard: Guard, handle: Handle, options: dict[str, Any], **server_options: Any) -> None:
        super().__init__(_answering(handle), **server_options)
        self._guard = guard
        self._options = options

    def connection(self) -> Connection:
        """For one more socket."""
        return Connection(self._guard, self, **self._options)

    def __call__(self) -> web.RequestHandler:
        return self.connection()


def _answering(handle: Handle) -> Handle:
    """The handler, with its connection told of begin and end.

    The header Expect is judged here because aiohttp does so before any middleware, and fails at one that is no UTF-8.
    """

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, Connection)
        connection.begin(request.content)
        try:
            if request.headers.get("Expect", "100-continue").lower() != "100-continue":
                return connection.refuse(request, UnmetExpectation("No such expectation can be met.", param="Expect"))
            response = await handle(request)
            if request.content.exception() is not None:
                response.force_close()  # nobody can tell where the next request would begin
            return response
        finally:
            connection.end()

    return answer


class GuardedRunner(web.AppRunner):
    """An application behind a guard."""

    def __init__(
        self, app: web.Application, config: ServerConfig, on_refusal: Callable[[str], None], shutdown_timeout_s: float
    ) -> None:
        super().__init__(app, shutdown_timeout=shutdown_timeout_s)
        self.guard = Guard(config, on_refusal)
        app.cleanup_ctx.append(self.guard.watching)
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
        server = await super()._make_server()
        return GuardedServer(
            self.guard,
            server.request_handler,
            self._options,
            request_factory=server.request_factory,
            handler_cancellation=True,  # a client that goes away cancels its handler, which aborts its sequences
        )

    async def listen(self, host: str, port: int, certificate: Certificate | None) -> asyncio.Server:
        """Accept connections from now on, with a certificate those that speak TLS. Raises OSError or UnicodeError.

        Whoever calls it closes it.
        """
        server = self.server
        assert isinstance(server, GuardedServer), "listen before setup"

        def accept() -> asyncio.Protocol:
            connection = server.connection()
            if certificate is None:
                return connection
            return Handshake(connection, certificate.context, self.guard.handshake_timeout_s)

        return await asyncio.get_running_loop().create_server(accept, host, port, backlog=128)
