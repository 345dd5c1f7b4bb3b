"""The link between the front end and the telemetry process: answers that come in time and are read too late."""

import asyncio
import socket
import threading
import time

import pytest

from roseinfer.observe.telemetry.link import Link, Reply


async def connected(end: socket.socket, replies: dict[str, Reply]) -> tuple[Link, asyncio.Event]:
    """A link, and what is set once it is down."""
    end.setblocking(False)
    lost = asyncio.Event()
    link = Link(replies, lambda _: None, lost.set)
    await asyncio.get_running_loop().create_connection(lambda: link, sock=end)
    return link, lost


async def answer_questions(end: socket.socket) -> None:
    async def echo(payload: bytes) -> bytes:
        return payload

    async def never(_: bytes) -> bytes:
        return await asyncio.Future()

    _, lost = await connected(end, {"echo": echo, "never": never})
    await lost.wait()


async def test_an_answer_that_has_come_counts_although_the_process_had_no_core_meanwhile() -> None:
    ours, theirs = socket.socketpair()
    other = threading.Thread(target=asyncio.run, args=(answer_questions(theirs),), daemon=True)
    other.start()
    link, lost = await connected(ours, {})
    assert await link.ask("echo", b"begins") == b"begins"
    asked = asyncio.create_task(link.ask("echo", b"x", timeout_s=0.05))
    await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251 - as if another process had the core
    assert await asked == b"x"
    with pytest.raises(TimeoutError):
        await link.ask("never", b"", timeout_s=0.01)
    link.close()
    await lost.wait()
    other.join()
