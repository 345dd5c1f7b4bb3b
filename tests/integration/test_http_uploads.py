"""A recording that is sent to be looked at has the deadline and the room of every other body."""

import asyncio
import json

from roseinfer.server.port import PORT
from tests.integration.test_http_debug import Operations, operations
from tests.integration.test_http_idle import NEVER_S, answer_to

HEAD = b"POST /debug/recording/view HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n"
MANY_BYTES = 800_000  # two of these are more than a MiB


async def connect(port: Operations) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(port.url.rpartition(":")[2]))


async def test_an_upload_that_stalls_is_answered_408() -> None:
    async with operations(body_timeout_s=0.1) as port:
        reader, writer = await connect(port)
        writer.write(HEAD + b"abc")
        status, body = await answer_to(reader)
        writer.transport.abort()
    assert (status, json.loads(body)["error"]["code"]) == (408, "body_timeout")


async def test_uploads_count_among_the_bodies_that_are_held() -> None:
    async with operations(body_timeout_s=NEVER_S, max_bodies_mib=1) as port:
        room = port.app[PORT].body_budget
        _, writer = await connect(port)
        writer.write(HEAD + MANY_BYTES * b"a")
        while room.num_bytes < MANY_BYTES:  # noqa: ASYNC110  # the server's, without an event
            await asyncio.sleep(0.01)
        refused = await port.ask("/debug/recording/view", "POST", data=MANY_BYTES * b"a")
        writer.transport.abort()
        while room.num_bytes:  # noqa: ASYNC110  # the same
            await asyncio.sleep(0.01)
        alone = await port.ask("/debug/recording/view", "POST", data=MANY_BYTES * b"a")
    assert (refused.status, refused.error["code"]) == (429, "overloaded")
    assert (alone.status, alone.error["param"]) == (400, "recording")
