"""Answers scrapers before aiohttp has to.

Pickers of gateways ask each server for its metrics every 50 ms, on connections that they use for nothing else. Through
aiohttp and our middlewares such a request takes most of a millisecond of a core that streams want, nearly all for
features that it does not use. Here its head goes to where the metrics are, from the API port to another process, and
the answer is written as it comes. From the first head on that is not a scraper's, a connection is aiohttp's for good.
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
from roseinfer.server.connection.connection import Connection
from roseinfer.server.middleware import ACCESS_LOG, SERVER
from roseinfer.server.ops.pages import LOAD_PATH, Page, head_of
from roseinfer.server.port import Port

Scrape = Callable[[bytes, bool, Callable[[bytes], None]], None]
"""Called with a scraper's head, whether it asks for `/metrics/load`, and what to call with the whole answer, or with
b"" where there is none."""


class Render(Protocol):
    """Makes a page of metrics, as `Pages` does, without waiting."""

    def __call__(self, accept: str, *, is_load: bool, takes_gzip: bool) -> Page: ...


_LOAD = f"GET {LOAD_PATH} ".encode()
_HEAD = re.compile(
    rb"GET (?P<path>/metrics(?:/load)?) HTTP/1\.1\r\n"
    rb"(?P<fields>(?:(?:host|user-agent|accept|accept-encoding|x-prometheus-scrape-timeout-seconds):[ -~]{0,1024}\r\n"
    rb"|connection: *keep-alive\r\n){1,8})\r\n",
    re.IGNORECASE,
)


class Scraping(asyncio.Protocol):
    """The protocol of a socket until the first request that is not a scraper's; then its `Connection` takes over."""

    def __init__(self, connection: Connection, port: Port, scrape: Scrape) -> None:
        self._connection = connection
        self._port = port
        self._scrape = scrape
        self._transport: asyncio.Transport
        self._known = b""  # the last head, which a scraper repeats
        self._head = b""  # whose answer has not come
        self._early = b""  # what came before it
        # A page that is not read in time counts as any other answer.
        self.pause_writing, self.resume_writing = connection.pause_writing, connection.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connection.enter(transport)

    def connection_lost(self, _: BaseException | None) -> None:
        self._connection.leave()

    def data_received(self, data: bytes) -> None:
        if self._head:
            self._early += data
            self._transport.pause_reading()
        elif (data != self._known and _HEAD.fullmatch(data) is None) or self._is_special():
            self._hand_over(data)
        else:
            self._head = self._known = data
            self._connection.begin(EMPTY_PAYLOAD)
            self._scrape(data, data.startswith(_LOAD), self._take)

    def _is_special(self) -> bool:
        """Whether the answer is to be logged, to say that the server stops, or to wait for a client that is slow."""
        return (
            ACCESS_LOG.isEnabledFor(logging.DEBUG)
            or self._port.state in {LifecycleState.DRAINING, LifecycleState.FAILED}
            or self._transport.get_write_buffer_size() > 0
        )

    def _take(self, answer: bytes) -> None:
        """Write the answer, or let aiohttp say why there is none."""
        if self._transport.is_closing():
            return
        self._connection.end()
        head, early = self._head, self._early
        self._head = self._early = b""
        if not answer:
            self._hand_over(head + early)
            return
        self._transport.write(answer)
        if early:
            self._transport.resume_reading()
            self.data_received(early)

    def _hand_over(self, data: bytes) -> None:
        self._transport.set_protocol(self._connection)
        self._connection.connection_made(self._transport)
        self._transport.resume_reading()
        self._connection.data_received(data)


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
    takes_gzip = b"gzip" in fields.get(b"accept-encoding", b"")
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
