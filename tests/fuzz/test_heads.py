"""Whatever bytes come down a socket, the answer is HTTP with the error object or nothing, and the server goes on."""

import asyncio
import http.client
import io
import json
import logging
from typing import Any

import pytest

from tests.fuzz.mutations import corpus, mutated
from tests.unit.server.harness import ScriptedEngine, Server, says, serving

NUM_MUTATIONS = 600
AT_ONCE = 150
KEPT = corpus("head")


async def fault_of(server: Server, content: bytes) -> str | None:
    """What is wrong with how the server took these bytes, until it closed: the client neither goes on nor away."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(content)
        answer = await reader.read()
    except ConnectionError:
        return None
    finally:
        writer.transport.abort()
    return _fault_in(answer)


def _fault_in(answer: bytes) -> str | None:
    """Of the first answer; nothing at all is none: the server closed."""
    if not answer:
        return None
    response = http.client.HTTPResponse(_Socket(answer))  # type: ignore[arg-type]
    try:
        response.begin()
        content = response.read()
    except (http.client.HTTPException, ValueError) as error:
        return f"no HTTP: {error!r}: {answer[:300]!r}"
    if response.status >= 500:
        return f"{response.status}: {content[:300]!r}"
    if response.status < 400:
        return None
    try:
        return None if json.loads(content)["error"]["code"] else "no code"
    except (ValueError, KeyError, TypeError):
        return None if not content else f"no error object: {content[:300]!r}"  # a HEAD has none


class _Socket:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._content)


async def test_the_kept_ones_and_ones_like_them(caplog: pytest.LogCaptureFixture) -> None:
    inputs = [content for _, content in KEPT]
    inputs += mutated(inputs, NUM_MUTATIONS, seed=1)
    deadlines: dict[str, Any] = dict.fromkeys(("head_timeout_s", "body_timeout_s", "idle_timeout_s"), 0.3)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(content: bytes) -> str | None:
        async with gate:
            fault = await fault_of(server, content)
        return fault and f"{fault}; keep this in the corpus: {content!r}"

    with caplog.at_level(logging.INFO):
        async with serving(ScriptedEngine(says("a")), **deadlines) as server:
            faults = [fault for fault in await asyncio.gather(*map(one, inputs)) if fault]
            assert (await server.complete()).status == 200
            await server.service.wait_idle()
    assert faults == []
    assert not [record for record in caplog.records if record.exc_info]
