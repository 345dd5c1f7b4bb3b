"""Answers scrapes of `/metrics` before aiohttp has to, in the process that has the metrics.

Pickers of gateways ask each server for its metrics every 50 ms, on connections that they use for nothing else. Through
aiohttp and our middlewares such a request takes most of a millisecond of a core that streams want, nearly all for
features that it does not use. So a connection of the API port that begins with a scraper's head goes to the process
that has the metrics, and comes back with the first head that is not a scraper's. From then on it is aiohttp's.
"""

import asyncio
import logging
import re
import uuid
from collections.abc import Callable
from email.utils import formatdate
from functools import lru_cache
from typing import NamedTuple, Protocol

from aiohttp import EMPTY_PAYLOAD

from roseinfer.records import LifecycleState
from roseinfer.runtime.passage import Passage
from roseinfer.server.connection.connection import Connection
from roseinfer.server.middleware import ACCESS_LOG, SERVER
from roseinfer.server.ops.pages import LOAD_PATH, Page, accepts_gzip, head_of
from roseinfer.server.port import Port

Scrape = Callable[[bytes, bool, Callable[[bytes], None]], None]
"""Called with a scraper's head, whether it asks for `/metrics/load`, and what to call with the whole answer, or with
b"" where there is none."""


class Render(Protocol):
    """Makes a page of metrics, as `Pages` does, without waiting."""

    def __call__(self, accept: str, *, is_load: bool, takes_gzip: bool) -> Page: ...


_AGAIN_S = 0.05  # after which a passage that is full is tried again
_LOAD = f"GET {LOAD_PATH} ".encode()
_HEAD = re.compile(
    rb"GET (?P<path>/metrics(?:/load)?) HTTP/1\.1\r\n"
    rb"(?P<fields>(?:(?:host|user-agent|accept|accept-encoding|x-prometheus-scrape-timeout-seconds):[ -~]{0,1024}\r\n"
    rb"|connection: *keep-alive\r\n){1,8})\r\n",
    re.IGNORECASE,
)


class _Beginning(asyncio.Protocol):
    """The protocol of a socket until its `Connection` takes over."""

    def __init__(self, connection: Connection, port: Port) -> None:
        self._connection = connection
        self._port = port
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connection.enter(transport)

    def connection_lost(self, _: BaseException | None) -> None:
        self._connection.leave()

    def _is_special(self) -> bool:
        """Whether an answer is to be logged, or to say that the server stops."""
        is_stopping = self._port.state in {LifecycleState.DRAINING, LifecycleState.FAILED}
        return is_stopping or ACCESS_LOG.isEnabledFor(logging.DEBUG)

    def _hand_over(self, data: bytes) -> None:
        self._transport.set_protocol(self._connection)
        self._connection.connection_made(self._transport)
        self._transport.resume_reading()
        self._connection.data_received(data)


class Sorting(_Beginning):
    """The protocol of a socket of the API port until its first bytes: a scraper's take it to the other process."""

    def __init__(self, connection: Connection, port: Port, passage: Passage) -> None:
        super().__init__(connection, port)
        self._passage = passage

    def data_received(self, data: bytes) -> None:
        is_scraper = _HEAD.fullmatch(data) is not None and not self._is_special()
        if not (is_scraper and self._passage.give(self._transport, data)):
            self._hand_over(data)


class Scraping(_Beginning):
    """The protocol of a socket until the first request that is not a scraper's."""

    def __init__(self, connection: Connection, port: Port, scrape: Scrape, passage: Passage | None = None) -> None:
        """One that came through a passage goes back there."""
        super().__init__(connection, port)
        self._scrape = scrape
        self._passage = passage
        self._known = b""  # the last head, which a scraper repeats
        self._head = b""  # whose answer has not come
        self._early = b""  # what came before the answer had gone
        self.pause_writing = connection.pause_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport.set_write_buffer_limits(0)  # a page that is not read in time counts as any other answer

    def resume_writing(self) -> None:
        self._connection.resume_writing()
        self._go_on()

    def data_received(self, data: bytes) -> None:
        if self._head or self._transport.get_write_buffer_size():
            self._early += data
            self._transport.pause_reading()
        elif (data != self._known and _HEAD.fullmatch(data) is None) or self._is_special():
            self._hand_over(data)
        else:
            self._head = self._known = data
            self._connection.begin(EMPTY_PAYLOAD)
            self._scrape(data, data.startswith(_LOAD), self._take)

    def _take(self, answer: bytes) -> None:
        """Write the answer, or let aiohttp say why there is none."""
        if self._transport.is_closing():
            return
        self._connection.end()
        head, self._head = self._head, b""
        if not answer:
            early, self._early = self._early, b""
            self._hand_over(head + early)
            return
        self._transport.write(answer)
        self._go_on()

    def _go_on(self) -> None:
        if self._early and not self._transport.get_write_buffer_size():
            early, self._early = self._early, b""
            self._transport.resume_reading()
            self.data_received(early)

    def _hand_over(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        if self._passage is None:
            self._transport.set_write_buffer_limits()
            super()._hand_over(data)
        elif not self._passage.give(self._transport, data):
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(_AGAIN_S, self._hand_over, data)


class Passed(asyncio.Protocol):
    """A connection that came through a passage, until its protocol has got what came with it."""

    def __init__(self, protocol: asyncio.Protocol, data: bytes) -> None:
        self._protocol = protocol
        self._data = data

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_protocol(self._protocol)
        self._protocol.connection_made(transport)
        if not transport.is_closing():
            self._protocol.data_received(self._data)


# --- in the process that has the metrics ------------------------------------------------------------------------------


class _Wanted(NamedTuple):
    accept: str
    is_load: bool
    takes_gzip: bool


@lru_cache(16)  # a scraper asks the same each time
def _wanted(head: bytes) -> _Wanted | None:
    found = _HEAD.fullmatch(head)
    if found is None:
        return None
    lines = [line.partition(b":") for line in found["fields"].splitlines()]
    fields = {name.lower(): value.strip() for name, _, value in lines}
    if len(fields) < len(lines) or not fields.get(b"host"):
        return None
    takes_gzip = accepts_gzip(fields.get(b"accept-encoding", b"").decode("latin-1"))
    return _Wanted(fields.get(b"accept", b"").decode(), found["path"].decode() == LOAD_PATH, takes_gzip)


def answer(head: bytes, render: Render) -> bytes:
    """The whole answer to a scraper's head; nothing where aiohttp should say what is wrong."""
    wanted = _wanted(head)
    if wanted is None:
        return b""
    page = render(wanted.accept, is_load=wanted.is_load, takes_gzip=wanted.takes_gzip)
    headers = (
        ("Server", SERVER),
        ("X-Request-Id", uuid.uuid4().hex),
        ("Date", formatdate(usegmt=True)),
        *head_of(page),
        ("Content-Length", str(len(page.content))),
    )
    text = "".join([f"{name}: {value}\r\n" for name, value in headers])
    return b"HTTP/1.1 200 OK\r\n" + text.encode() + b"\r\n" + page.content
