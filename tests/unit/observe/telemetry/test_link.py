"""The link between the front end and the telemetry process: answers that come in time and are read too late."""

import asyncio
import socket
import threading
import time

import msgspec
import pytest

from roseinfer.observe.telemetry.facts import Answer, Message, Question, Stalled
from roseinfer.observe.telemetry.link import Link, Reply
from roseinfer.runtime.frames import FrameBuffer, encode_frame


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


async def test_answers_to_a_side_that_has_gone_are_no_lines_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    for number in range(1, 21):
        theirs.sendall(encode_frame(Question(number, "echo", b"x")))
    theirs.close()
    _, lost = await connected(ours, {"echo": lambda payload: payload})
    await lost.wait()
    assert caplog.messages == []


async def test_questions_that_are_not_answered_in_time_end_without_an_answer() -> None:
    async def at_once(_: bytes) -> bytes:
        return b"x"

    async def never(_: bytes) -> bytes:
        return await asyncio.Future()

    ours, theirs = socket.socketpair()
    link, lost = await connected(ours, {})
    other, _ = await connected(theirs, {"at_once": at_once, "never": never})
    ends: list[asyncio.Future[bytes | None]] = []
    for name in ("never", "at_once", "never"):
        ends.append(asyncio.get_running_loop().create_future())
        link.ask_then(name, 0.1, ends[-1].set_result)
    assert await asyncio.wait_for(asyncio.gather(*ends), 5) == [None, b"x", None]
    assert not link._asked
    assert not link._deadlines
    other.close()
    await lost.wait()


async def test_work_that_fails_holds_nothing_back() -> None:
    ours, theirs = socket.socketpair()
    link, lost = await connected(ours, {})

    def fail() -> None:
        link.send(Stalled(7))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        link.together(fail)
    link.send(Stalled(8))
    theirs.setblocking(False)
    frames = FrameBuffer()
    taken: list[object] = []
    while len(taken) < 2:
        data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(theirs, 1 << 16), 10)
        taken += [msgspec.msgpack.decode(frame, type=Message) for frame in frames.feed(data)]
    assert taken == [Stalled(7), Stalled(8)]
    theirs.close()
    await lost.wait()


async def test_what_a_question_has_sent_comes_before_its_answer_in_one_write() -> None:
    ours, theirs = socket.socketpair()

    def sync(_: bytes) -> bytes:
        link.send(Stalled(7))
        link.send(Stalled(8))
        return b"done"

    link, lost = await connected(ours, {"sync": sync})
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(theirs, encode_frame(Question(1, "sync", b"")))
    frames = FrameBuffer().feed(await loop.sock_recv(theirs, 1 << 16))
    taken = [msgspec.msgpack.decode(frame, type=Message) for frame in frames]
    assert taken == [Stalled(7), Stalled(8), Answer(1, b"done")]
    theirs.close()
    await lost.wait()
