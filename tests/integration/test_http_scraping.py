"""Scrapers are answered without aiohttp, with the answers that aiohttp gives."""

import asyncio
import gzip
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from typing import Any

import pytest

from roseinfer.errors import NotReady
from roseinfer.records import LifecycleState
from roseinfer.runtime.passage import Passage, make_passage
from roseinfer.server.app import PASSAGE, SCRAPE
from roseinfer.server.connection import connection, listener
from roseinfer.server.connection.scraping import answer as answer_to
from tests.integration.live_server import closed
from tests.integration.test_http_connections import connected
from tests.unit.server.harness import INSTRUMENTS, Page, ScriptedEngine, Server, answering, ops_app, serving

PROMETHEUS = (
    b"GET /metrics HTTP/1.1\r\nHost: x:8000\r\nUser-Agent: Prometheus/3.5.0\r\n"
    b"Accept: application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1\r\n"
    b"Accept-Encoding: gzip\r\nX-Prometheus-Scrape-Timeout-Seconds: 10\r\n\r\n"
)
PICKER = b"GET /metrics/load HTTP/1.1\r\nHost: 10.0.0.7\r\nUser-Agent: Go\r\nAccept-Encoding: gzip\r\n\r\n"
PLAIN = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
MORE_THAN_BUFFERS = 20_000_000  # bytes: a kernel holds four megabytes for a sender that is not read, or sixteen


class Pages:
    """The other process, in this one: makes pages that name what was asked for, once it may."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.was_asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.has_them = True
        self.size = 0
        self.passage: Passage  # while there is a server
        self._answering: asyncio.Task[None] | None = None

    async def make(self, accept: str, *, is_load: bool, takes_gzip: bool) -> Page:
        await self.wait()
        if not self.has_them:
            raise NotReady("There is no page.")
        return self.render(accept, is_load=is_load, takes_gzip=takes_gzip)

    async def wait(self) -> None:
        self.num_asked += 1
        self.was_asked.set()
        await self.may_answer.wait()

    def render(self, accept: str, *, is_load: bool, takes_gzip: bool) -> Page:
        content = f"# page {self.num_asked} {accept} {is_load}\n".encode() + b"#" * self.size
        return Page(gzip.compress(content) if takes_gzip else content, "text/plain", takes_gzip)

    def scrape(self, head: bytes, is_load: bool, take: Callable[[bytes], None]) -> None:
        assert is_load == head.startswith(b"GET /metrics/load")

        async def run() -> None:
            await self.wait()
            take(answer_to(head, self.render) if self.has_them else b"")

        self._answering = asyncio.create_task(run())

    @asynccontextmanager
    async def server(self, **options: Any) -> AsyncIterator[Server]:
        """An API port, whose scrapers this answers."""
        self.passage, end = make_passage()
        other_end = Passage(end)
        instruments = replace(INSTRUMENTS, pages=self.make, telemetry=self)  # type: ignore[arg-type]
        with closing(self.passage), closing(other_end):
            async with serving(ScriptedEngine(), instruments=instruments, **options) as server:
                app = ops_app(server.service)
                app[SCRAPE], app[PASSAGE] = self.scrape, other_end
                async with answering(app) as (_, self.listener):
                    yield server

    async def until_no_connections(self, server: Server) -> None:
        """Return when neither process has one."""
        async with asyncio.timeout(20):
            while len(server.runner.connections) + len(self.listener.connections):  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(0.01)


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What aiohttp gets first on each connection."""
    handed: list[bytes] = []

    class Noting(connection.Connection):
        _has_begun = False

        def data_received(self, data: bytes) -> None:
            if not self._has_begun:
                handed.append(data)
            self._has_begun = True
            super().data_received(data)

    monkeypatch.setattr(listener, "Connection", Noting)
    return handed


def hold_little(writer: asyncio.StreamWriter) -> None:
    """Have the kernel hold a megabyte at most that this client has not read; else dozens."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1_000_000)


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()[:-1]
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers["content-length"]))
    return int(status.split()[1]), headers, gzip.decompress(body) if "content-encoding" in headers else body


def read(head: bytes) -> bytes:
    """The body of the answer."""
    pages = Pages()
    pages.num_asked = 1
    whole = answer_to(head, pages.render)
    first, _, body = whole.partition(b"\r\n\r\n")
    return gzip.decompress(body) if b"Content-Encoding: gzip" in first else body


def test_what_scrapers_ask_for() -> None:
    accept = b"application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1"
    assert read(PROMETHEUS) == b"# page 1 " + accept + b" False\n"
    assert read(PICKER) == b"# page 1  True\n"
    assert read(PLAIN.replace(b"\r\n\r\n", b"\r\nconnection: keep-alive\r\n\r\n")) == b"# page 1  False\n"


@pytest.mark.parametrize(
    ("accepted", "is_compressed"),
    [("gzip", True), ("br, GZIP;q=0.5", True), ("gzip; q=0", False), ("gzip;q=0.000,*", False), ("identity", False)],
)
def test_compressed_as_the_header_says(accepted: str, is_compressed: bool) -> None:
    head = PLAIN.replace(b"\r\n\r\n", f"\r\nAccept-Encoding: {accepted}\r\n\r\n".encode())
    assert (b"Content-Encoding" in answer_to(head, Pages().render)) == is_compressed


@pytest.mark.parametrize(
    "head",
    [
        PLAIN[:-2],
        PLAIN + b"G",
        PLAIN + PLAIN,
        PLAIN.replace(b"GET", b"HEAD"),
        PLAIN.replace(b"1.1", b"1.0"),
        PLAIN.replace(b"/metrics", b"/metrics?x=1"),
        PLAIN.replace(b"/metrics", b"/metricsx"),
        PLAIN.replace(b"Host: x\r\n", b""),
        PLAIN.replace(b"Host: x", b"Host: x\r\nHost: y"),
        PLAIN.replace(b"Host: x", b"Host: x\r\n Folded: y"),
        PLAIN.replace(b"Host: x", b"Host:"),
        PLAIN.replace(b"Host: x", b"Host: \xff"),
        PLAIN.replace(b"Host: x", b"Host: x\nOrigin: y"),
        PLAIN.replace(b"Host: x", b"Host: x\r\nContent-Length: 1"),
        PLAIN.replace(b"Host: x", b"Host: x\r\nTransfer-Encoding: chunked"),
        PLAIN.replace(b"Host: x", b"Host: x\r\nConnection: close"),
        PLAIN.replace(b"Host: x", b"Host: x\r\nX-Request-Id: mine"),
        PLAIN.replace(b"Host: x", b"Host: x\r\nOrigin: http://a"),
        PLAIN.replace(b"Host: x", b"Host: x\r\nAccept: " + b"a" * 2000),
    ],
)
def test_all_else_is_not_a_scraper_s(head: bytes) -> None:
    assert read(head) == b""


async def test_answers_are_those_of_aiohttp(handed_over: list[bytes]) -> None:
    pages = Pages()
    async with pages.server() as server, connected(server) as (reader, writer):
        seen = []
        for head in (PICKER, PICKER.replace(b"User-Agent", b"X-Agent")):
            writer.write(head)
            seen.append(await answer(reader))
    (status, quick, body), (slow_status, slow, slow_body) = seen
    assert (status, body) == (slow_status, b"# page 1  True\n")
    assert slow_body == b"# page 2  True\n"
    assert set(quick) == set(slow)
    fixed = ("content-type", "content-encoding", "content-length", "server")
    assert [quick[name] for name in fixed] == [slow[name] for name in fixed]
    assert quick["x-request-id"] != slow["x-request-id"]
    assert len(handed_over) == 1


async def test_a_scraper_keeps_its_connection_and_may_ask_for_anything(handed_over: list[bytes]) -> None:
    pages = Pages()
    async with pages.server() as server, connected(server) as (reader, writer):
        for number in range(1, 4):
            writer.write(PROMETHEUS)
            assert (await answer(reader))[2].startswith(b"# page %d " % number)
        assert handed_over == []
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"version" in (await answer(reader))[2]
        writer.write(PROMETHEUS)
        assert (await answer(reader))[2].startswith(b"# page 4 ")
    assert len(handed_over) == 1


async def test_what_comes_before_the_answer_is_answered_after_it() -> None:
    pages = Pages()
    async with pages.server() as server, connected(server) as (reader, writer):
        pages.may_answer.clear()
        writer.write(PLAIN)
        await pages.was_asked.wait()
        writer.write(PLAIN)
        await asyncio.sleep(0.01)
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.01)
        assert pages.num_asked == 1
        pages.may_answer.set()
        bodies = [(await answer(reader))[2] for _ in range(3)]
    assert bodies[:2] == [b"# page 1  False\n", b"# page 2  False\n"]
    assert b"version" in bodies[2]


async def test_a_long_body_behind_a_scrape_comes_back_whole(handed_over: list[bytes]) -> None:
    pages = Pages()
    async with pages.server() as server, connected(server) as (reader, writer):
        body = json.dumps({"prompt": "x" * 400_000}).encode()
        head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        pages.may_answer.clear()
        writer.write(PLAIN)
        await pages.was_asked.wait()
        writer.write(head.encode() + body)
        await asyncio.sleep(0.05)
        pages.may_answer.set()
        assert (await answer(reader))[2] == b"# page 1  False\n"
        assert json.loads((await answer(reader))[2])["count"] == 400_000
    assert len(handed_over) == 1


async def test_a_connection_comes_back_when_the_passage_has_room_again(
    monkeypatch: pytest.MonkeyPatch, handed_over: list[bytes]
) -> None:
    async with Pages().server() as server, connected(server) as (reader, writer):
        writer.write(PLAIN)
        await answer(reader)
        with monkeypatch.context() as patch:
            patch.setattr(Passage, "give", lambda *_: False)
            writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(0.1)
            assert handed_over == []
        assert b"version" in (await answer(reader))[2]


async def test_a_connection_that_cannot_go_is_answered_by_aiohttp(handed_over: list[bytes]) -> None:
    pages = Pages()
    async with pages.server() as server, connected(server) as (reader, writer):
        pages.passage.close()
        writer.write(PLAIN)
        assert (await answer(reader))[2] == b"# page 1  False\n"
    assert handed_over == [PLAIN]


async def test_the_next_page_follows_one_that_is_read_slowly() -> None:
    pages = Pages()
    pages.size = MORE_THAN_BUFFERS
    async with pages.server() as server, connected(server) as (reader, writer):
        hold_little(writer)
        writer.write(PLAIN)
        await pages.was_asked.wait()
        await asyncio.sleep(0.05)
        writer.write(PLAIN)
        await asyncio.sleep(0.05)
        assert pages.num_asked == 1
        assert [(await answer(reader))[2][:9] for _ in range(2)] == [b"# page 1 ", b"# page 2 "]


async def test_where_there_is_no_page_aiohttp_says_why(handed_over: list[bytes]) -> None:
    pages = Pages()
    pages.has_them = False
    async with pages.server() as server, connected(server) as (reader, writer):
        writer.write(PLAIN)
        status, headers, body = await answer(reader)
    assert status == 503
    assert "retry-after" in headers
    assert json.loads(body)["error"]["message"] == "There is no page."
    assert handed_over == [PLAIN]


async def test_a_server_that_stops_says_so_and_a_log_for_debugging_has_all(
    handed_over: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async with Pages().server() as server:
        with caplog.at_level(logging.DEBUG, "roseinfer.access"):
            assert (await server.get("/metrics")).status == 200
        assert [record.path for record in caplog.records if record.name == "roseinfer.access"] == ["/metrics"]  # type: ignore[attr-defined]
        server.service.state = LifecycleState.DRAINING
        async with connected(server) as (reader, writer):
            writer.write(PLAIN)
            assert (await answer(reader))[1]["connection"] == "close"
    assert len(handed_over) == 2


async def test_a_scraper_that_leaves_or_does_not_read_holds_nothing() -> None:
    pages = Pages()
    async with pages.server(write_timeout_s=0.2, idle_timeout_s=60) as server:
        pages.may_answer.clear()
        async with connected(server) as (_, writer):
            writer.write(PLAIN)
            await pages.was_asked.wait()
        await pages.until_no_connections(server)
        pages.may_answer.set()
        pages.was_asked.clear()
        pages.size = MORE_THAN_BUFFERS
        async with connected(server) as (reader, writer):
            hold_little(writer)
            writer.write(PLAIN)
            await pages.was_asked.wait()
            await pages.until_no_connections(server)
            assert len(await closed(reader)) < pages.size


async def test_a_scraper_that_asks_no_more_is_closed() -> None:
    async with Pages().server(idle_timeout_s=0.2) as server, connected(server) as (reader, writer):
        writer.write(PLAIN)
        await answer(reader)
        assert await closed(reader) == b""


async def test_with_keys_a_scraper_needs_one() -> None:
    async with Pages().server(keys=["k" * 20]) as server, connected(server) as (reader, writer):
        writer.write(PLAIN)
        assert (await answer(reader))[0] == 401
