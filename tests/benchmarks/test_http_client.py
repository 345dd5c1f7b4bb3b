"""The driver of a workload against a small server: stamps, counts, errors, and the schedule."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from benchmarks.http_client import ServerRefused, drive, is_answering
from benchmarks.workloads import PlannedRequest
from roseinfer.bench.load.endpoint import Endpoint

PIECES = [b'data: {"choices": [{"text": "a"}]}\n\n', b'data: {"choices": [{"text": ""}]}\n\n']
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'


async def complete(request: web.Request) -> web.StreamResponse:
    """Two tokens in one piece, or what the prompt asks for."""
    body: dict[str, Any] = await request.json()
    if body["prompt"] == "refuse":
        return web.Response(status=503, text="overloaded")
    response = web.StreamResponse()
    await response.prepare(request)
    if body["prompt"] == "break":
        await response.write(b'data: {"error": {"message": "the engine is gone"}}\n\n')
        return response
    for piece in PIECES:
        await response.write(piece)
    await response.write(USAGE)
    return response


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """The server runs in a thread: the client brings its own event loop."""
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)

    async def begin() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    port = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    yield Endpoint(f"http://127.0.0.1:{port}", model="some-model")
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def planned(text: str, at: float = 0.0, new_tokens: int = 2) -> PlannedRequest:
    return PlannedRequest(at, text, [1], new_tokens)


def test_a_piece_has_a_stamp_and_usage_counts_the_tokens(endpoint: Endpoint) -> None:
    [stream] = drive(endpoint, [planned("hello")])
    assert stream.num_tokens == 2
    assert stream.token_counts == [1, 1], "a piece whose bytes are not a whole character has its token too"
    assert stream.token_ns[0] > stream.sent_ns


def test_requests_go_out_when_they_are_due(endpoint: Endpoint) -> None:
    first, second = drive(endpoint, [planned("hello"), planned("hello", at=0.1)])
    assert second.intended_ns - first.intended_ns == 100_000_000
    assert second.sent_ns >= second.intended_ns


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (planned("refuse"), "503: overloaded"),
        (planned("break"), "the engine is gone"),
        (planned("hello", new_tokens=3), "2 tokens in place of 3"),
    ],
)
def test_what_is_not_as_agreed_is_refused(request_: PlannedRequest, message: str, endpoint: Endpoint) -> None:
    with pytest.raises(ServerRefused, match=message):
        drive(endpoint, [request_])


def test_a_server_that_is_not_there_is_not_answering(endpoint: Endpoint) -> None:
    assert not is_answering(endpoint), "it gives two tokens where one was asked for"
    with pytest.raises(ServerRefused, match="Connect"):
        drive(Endpoint("http://127.0.0.1:9", model="none"), [planned("hello")])


def test_only_this_host_is_driven() -> None:
    with pytest.raises(ServerRefused, match="not on this host"):
        drive(Endpoint("http://example.com", model="none"), [planned("hello")])
