"""Bounds the number of connections to a port, and the time that each may take for a head, a rest or an answer.

aiohttp bounds the lines of a head, and has no deadline for a head or for a reader that stalls and no cap on the number
of sockets. `Connection` is aiohttp's own protocol, which also notes since when its client owes something; `Connections`
looks at all of them a few times in the shortest deadline and drops those that are late. The deadline of a body is in
`body.py`, because an answer is still possible there.
"""

import asyncio
import contextlib
import logging
import resource
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from itertools import islice
from typing import Any

from aiohttp import EMPTY_PAYLOAD, StreamReader, http_parser, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from roseinfer.config.options import ServerConfig
from roseinfer.errors import ConfigError, HeadTooLarge, MalformedRequest, RoseinferError
from roseinfer.server.middleware import error_response, request_id_of

MAX_LINE_BYTES = 8190  # of the request line, and of one header
MAX_HEADERS = 128
# Connections of one port at once, and never more than the process may open.
LEAST_CONNECTIONS = 2048
CONNECTIONS_PER_REQUEST = 2  # of `server.max_inflight`: half of them are idle, or half come from one proxy
HEAD_TIMEOUT_S = 10.0  # from the connection, whose TLS handshake is part of it, or from the first byte
SPARE_DESCRIPTORS = 64  # of the process's own files, and of those that are let in beyond the cap
# Beyond the cap, for addresses that have hardly any: a kubelet that got no answer would end a server that is only full.
RESERVED_CONNECTIONS = 16
RESERVED_FOR_PEER = 4
HIGH_WATER_BYTES = 64 * 1024  # asyncio's: no write waits that leaves less in an empty buffer
_CHECKS_IN_A_DEADLINE = 4
LONGEST_CHECK_S = 1.0
# aiohttp's words, as of 3.14.5: it has no class for this. If a later version says it otherwise, the answer to too many
# headers becomes a 400, which tests/integration/test_http_connections.py notices.
_TOO_MANY_HEADERS = "Too many headers received"

_log = logging.getLogger(__name__)


def require_compiled_parser() -> None:
    """Raise ConfigError where aiohttp was installed without its compiled parser: the other one is slow and laxer."""
    if http_parser.HttpRequestParser is http_parser.HttpRequestParserPy:
        raise ConfigError(
            "aiohttp has no compiled HTTP parser here: install its wheel, and leave AIOHTTP_NO_EXTENSIONS unset."
        )


class Connection(web.RequestHandler):
    """One socket, with what its client owes and since when: a head, the next request, or the reading of an answer."""

    def __init__(self, connections: "Connections", server: web.Server, **options: Any) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, **options)
        self.peer = ""
        self._connections = connections
        self._now = loop.time
        self._socket: asyncio.Transport | None = None  # without the TLS that it may carry
        self._head_since: float | None = loop.time()  # None: none has begun
        self._idle_since = loop.time()
        self.head_ns = 0  # when the next request's head was parsed, and the answer before it over
        self._is_answering = False  # meanwhile a client may send the next head as slowly as it likes
        self._arriving: StreamReader = EMPTY_PAYLOAD  # the body of the last request whose head is complete
        self._begun: StreamReader = EMPTY_PAYLOAD  # the body of the last request that was begun
        self._full_since: float | None = None  # when its write buffer became full, if it still is

    @property
    def _queue(self) -> "deque[tuple[Any, StreamReader]]":
        """The requests and errors that aiohttp has parsed and not begun, with their bodies.

        Not public in aiohttp; checked with 3.14.5. The only other such name is in `listener.py:Listener`.
        """
        return self._messages

    def enter(self, transport: asyncio.Transport) -> bool:
        """Count among the connections; at the cap the socket is closed instead."""
        address = transport.get_extra_info("peername")
        self.peer = str(address[0]) if isinstance(address, tuple) else ""
        if not self._connections.enter(self):
            transport.abort()
            return False
        self._socket = transport
        return True

    def leave(self) -> None:
        if self._socket is not None:
            self._socket = None
            self._connections.leave(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if self._socket is not None or self.enter(transport):  # it counts since its TLS handshake
            super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if data and self._head_since is None and self._arriving.is_eof():  # else it is the rest of a body
            self._head_since = self._now()
        num_queued = len(self._queue)
        super().data_received(data)
        if len(self._queue) > num_queued == 0 and not self._is_answering:
            self.head_ns = time.monotonic_ns()
        for message, content in [*islice(self._queue, num_queued, None)]:
            if isinstance(message, RawRequestMessage):
                self._arriving = content
            elif not self._arriving.is_eof():
                self._break_body()

    def _break_body(self) -> None:
        """End a body with an error in it: aiohttp queues the error as a request, and waits for the rest of the body."""
        self._queue.pop()  # with it one request would have two answers
        if self._arriving is not self._begun or self._is_answering:  # else aiohttp only throws the rest of it away
            self._arriving.set_exception(web.RequestPayloadError())
        self._arriving.feed_eof()
        if not self._queue:
            self.close()  # behind the answer

    def pause_writing(self) -> None:
        self._full_since = self._now()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._full_since = None
        self._wait_anew()  # it was reading an answer until now
        super().resume_writing()

    def begin(self, content: StreamReader) -> None:
        """Note that a head is complete; its body may be on its way, also behind an answer that refuses it."""
        self._begun, self._head_since, self._is_answering = content, None, True
        if content.exception() is not None:
            self.close()  # behind the answer

    def end(self) -> None:
        """Note that a request has its answer, or will have none."""
        self._is_answering = False
        self.head_ns = time.monotonic_ns()  # of one that has come already
        self._wait_anew()

    def _wait_anew(self) -> None:
        """Count from now the time for the next request, or for the rest of its head."""
        self._idle_since = self._now()
        if self._head_since is not None:
            self._head_since = self._idle_since

    def lateness(self, now: float, config: ServerConfig) -> str | None:
        """What is overdue at the time `now` of the loop, or None."""
        if self._full_since is not None:
            return "the reading of an answer" if now - self._full_since > config.write_timeout_s else None
        if self._is_answering:
            return None
        if self._head_since is not None:
            return "the head of a request" if now - self._head_since > HEAD_TIMEOUT_S else None
        return "the next request" if now - self._idle_since > config.idle_timeout_s else None

    @property
    def num_unsent_bytes(self) -> int:
        """What was written and the system has not taken, in the buffers of TLS too."""
        if self._socket is None or self.transport is None:
            return 0
        num_bytes = self._socket.get_write_buffer_size()
        return num_bytes if self.transport is self._socket else num_bytes + self.transport.get_write_buffer_size()

    def drop(self) -> None:
        """Close without waiting for what the client has not read."""
        if self._socket is not None:
            self._socket.abort()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what is no HTTP in the form of every other error; aiohttp's own answer is plain text."""
        if request.writer.output_size > 0:
            raise ConnectionError("An answer is already on its way.")
        error: RoseinferError
        if status >= 500:  # the middlewares let nothing through: this is a bug
            _log.error("unexpected error outside a handler", exc_info=exc)
            error = RoseinferError("Something went wrong inside the server.")
        elif isinstance(exc, LineTooLong):
            error = HeadTooLarge(f"A line of the head is longer than {MAX_LINE_BYTES} bytes.")
        elif isinstance(exc, BadHttpMessage) and exc.message == _TOO_MANY_HEADERS:
            error = HeadTooLarge(f"The head has more than {MAX_HEADERS} headers.")
        else:
            error = MalformedRequest(f"This cannot be read as an HTTP request: {_first_line(message or '')}.")
        return self.refuse(request, error)

    def refuse(self, request: web.BaseRequest, error: RoseinferError) -> web.Response:
        """Answer a head that no handler gets; every answer has an id."""
        request_id = request_id_of(request)
        facts = {"request_id": request_id, "peer": self.peer, "reason": error.message}
        _log.info("answered without a handler", extra=facts)
        self._connections.on_refusal(error.public_code)
        response = error_response(error, {"X-Request-Id": request_id})
        response.force_close()
        return response


def is_behind(request: web.Request, num_bytes: int = 0) -> bool:
    """Whether the client has not read all that was written, so that a write of `num_bytes` may wait for it.

    aiohttp's own `writing_paused` is false again when a write that waited returns.
    """
    connection = request.protocol
    assert isinstance(connection, Connection)
    return request.transport is not None and (connection.num_unsent_bytes > 0 or num_bytes > HIGH_WATER_BYTES)


def _first_line(text: str) -> str:
    """Aiohttp's message about a head, without the piece of it that it quotes."""
    return text.partition("\n")[0].rstrip(" :.") or "malformed"


class Connections:
    """All connections of one port, which are capped and watched."""

    def __init__(self, config: ServerConfig, on_refusal: Callable[[str], None]) -> None:
        """`on_refusal` gets the code of each answer to a head that no handler gets."""
        self._config = config
        self.on_refusal = on_refusal
        self.handshake_timeout_s = HEAD_TIMEOUT_S  # it is part of the head
        wanted = max(LEAST_CONNECTIONS, CONNECTIONS_PER_REQUEST * config.max_inflight)
        self.max_connections = _spare_descriptors(wanted)
        # Of one address: half of all, because a proxy in front is one address.
        self._max_connections_of_peer = max(1, self.max_connections // 2)
        self._connections: set[Connection] = set()
        self._by_peer: Counter[str] = Counter()
        self._num_refused = 0

    def __len__(self) -> int:
        return len(self._connections)

    def enter(self, connection: Connection) -> bool:
        """Count one more, unless there are too many in all or from its address; says whether it counts."""
        num_of_peer = self._by_peer[connection.peer]
        num_reserved = RESERVED_CONNECTIONS if num_of_peer < RESERVED_FOR_PEER else 0
        if (
            len(self._connections) >= self.max_connections + num_reserved
            or num_of_peer >= self._max_connections_of_peer
        ):
            self._num_refused += 1
            return False
        self._connections.add(connection)
        self._by_peer[connection.peer] += 1
        return True

    def leave(self, connection: Connection) -> None:
        self._connections.remove(connection)
        self._by_peer[connection.peer] -= 1
        if not self._by_peer[connection.peer]:
            del self._by_peer[connection.peer]

    async def watching(self, _app: web.Application) -> AsyncIterator[None]:
        """Watch for as long as the application runs; for `Application.cleanup_ctx`."""
        task = asyncio.create_task(self._watch())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        for connection in [*self._connections]:  # those in a handshake, which aiohttp does not have
            connection.drop()

    async def _watch(self) -> None:
        config = self._config
        shortest = min(HEAD_TIMEOUT_S, config.idle_timeout_s, config.write_timeout_s)
        while True:
            await asyncio.sleep(min(LONGEST_CHECK_S, shortest / _CHECKS_IN_A_DEADLINE))
            self._check(asyncio.get_running_loop().time())

    def _check(self, now: float) -> None:
        for connection in [*self._connections]:
            if (overdue := connection.lateness(now, self._config)) is not None:
                _log.info("closing a connection", extra={"peer": connection.peer, "overdue": overdue})
                connection.drop()
        if self._num_refused:
            _log.warning("connections refused at the cap", extra={"num_refused": self._num_refused})
            self._num_refused = 0


def _spare_descriptors(num_wanted: int) -> int:
    """How many sockets the process may open beside its own files; for more, raises a soft limit, often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_wanted + SPARE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return num_wanted
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, soft - SPARE_DESCRIPTORS)
