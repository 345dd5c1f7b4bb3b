"""Answers of every framing, in pieces of every size, through one connection."""

import asyncio
import contextlib
import time
from collections.abc import Sequence

import pytest

from roseinfer.bench.load import connection
from roseinfer.bench.load.client import LoadClient, PreparedRequest
from roseinfer.bench.load.connection import open_connection
from roseinfer.bench.load.endpoint import Endpoint

BODY = b"data: {}\r\n\r\n" * 3
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED += b"c\r\n%b\r\n18;x=y\r\n%b\r\n0\r\n\r\n" % (BODY[:12], BODY[12:])
SIZED = b"HTTP/1.1 429 Too Many\r\ncontent-length: 36\r\nRetry-After: 7\r\n\r\n" + BODY
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + BODY


async def post(*answers: Sequence[bytes], num_posts: int = 1, is_left: bool = False) -> list[tuple[bytes, int]]:
    """The body and status of each answer; the server writes the pieces of one for each request, then closes."""
    served = iter(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            for pieces in served:
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1:")
                assert await reader.readexactly(2) == b"{}"
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    seen: list[tuple[bytes, int]] = []
    async with server, asyncio.timeout(10):
        opened = await open_connection(url, time.monotonic_ns)
        for _ in range(num_posts):
            reads: list[bytes] = []

            def keep(now_ns: int, data: bytes, reads: list[bytes] = reads) -> bool:
                assert now_ns >= opened.sent_ns > 0
                reads.append(data)
                return not is_left

            await opened.ask("POST", "/v1/x", {}, b"{}", keep)
            seen.append((b"".join(reads), opened.status))
        assert opened.is_open is (num_posts == 2)
        opened.close()
    return seen


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_answers_are_unframed_and_the_connection_is_used_again(size: int) -> None:
    def pieces(answer: bytes) -> list[bytes]:
        return [answer[at : at + size] for at in range(0, len(answer), size)]

    made = await post(pieces(CHUNKED), pieces(SIZED), num_posts=2)
    assert made == [(BODY, 200), (BODY, 429)]


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    assert await post([UNTIL_CLOSED]) == [(BODY, 200)]


@pytest.mark.parametrize("interim", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Hints\r\nLink: </a>\r\n\r\n"])
async def test_the_answer_is_the_one_behind_what_a_server_says_before_it(interim: bytes) -> None:
    made = await post([interim + CHUNKED], [interim, interim[:9], interim[9:] + SIZED], num_posts=2)
    assert made == [(BODY, 200), (BODY, 429)]


async def test_an_answer_without_content_has_no_body_to_wait_for() -> None:
    no_content = b"HTTP/1.1 204 No Content\r\n\r\n"
    assert await post([no_content], [SIZED], num_posts=2) == [(b"", 204), (BODY, 429)]


async def test_a_request_that_had_no_time_says_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await reader.read()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    endpoint = Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    request = PreparedRequest(request_id="a", path="/v1/completions", body=b"{}")
    async with server, LoadClient(endpoint, timeout_s=0.05) as client:
        assert (await client.send(request)).error == "no answer: it took more than 0.05 s"
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 0.0)
    async with LoadClient(endpoint) as client:
        assert (await client.send(request)).error == "no answer: no connection within 0 s"


async def test_a_reader_that_has_enough_closes_the_connection() -> None:
    [(body, status)] = await post([CHUNKED[:70], CHUNKED[70:]], is_left=True)
    assert (status, BODY.startswith(body), len(body) < len(BODY)) == (200, True, True)


@pytest.mark.parametrize("answer", [b"", CHUNKED[:-9], SIZED[:-9], b"HTTP/1.1 nothing\r\n\r\n"])
async def test_an_answer_that_breaks_off_is_an_error(answer: bytes) -> None:
    with pytest.raises(ConnectionError, match=r"before the end of its answer|is not HTTP"):
        await post([answer])


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 nothing\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: nan\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc\r\n",
    ],
)
async def test_an_answer_that_is_not_http_is_an_error_and_no_traceback(
    answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConnectionError, match="the answer is not HTTP"):
        await post([answer])
    assert not caplog.records
