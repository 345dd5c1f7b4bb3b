"""Turns JSON payloads into server-sent events. Knows neither what they say nor when they are due."""

import asyncio
import time
from collections.abc import Callable, Coroutine

import msgspec
from aiohttp import web

DONE = b"data: [DONE]\n\n"
NOTHING = b"{}"  # a payload that says nothing
COMMENT = b": keep-alive\n\n"  # what begins with a colon is no event, and clients skip it


def event(payload: bytes) -> bytes:
    """One event; `payload` is JSON and so holds no line break."""
    return b"data: " + payload + b"\n\n"


async def open_stream(request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
    """Send the status line and the headers of an event stream, and more headers."""
    stream = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # nginx would hold events back to fill its buffer
            **headers,
        }
    )
    await stream.prepare(request)
    return stream


class Beacon:
    """Says that a stream is alive after each interval in which nothing else was said, even before its first event.

    One timer, which looks when the last event was: telling it of an event is one assignment.
    """

    def __init__(self, interval_s: float, say: Callable[[], Coroutine[None, None, None]]) -> None:
        self.last_s = time.monotonic()  # of the last event
        self._interval_s = interval_s
        self._say = say
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._look) if interval_s else None

    def _look(self) -> None:
        left_s = self.last_s + self._interval_s - time.monotonic()
        if left_s <= 0:
            self.last_s, left_s = time.monotonic(), self._interval_s
            self._task = asyncio.create_task(self._say())
        self._timer = asyncio.get_running_loop().call_later(left_s, self._look)

    async def stop(self) -> None:
        """Say no more; what is being said is said to its end."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            await asyncio.wait({self._task})


class ChunkTemplate:
    """The chunks of one stream: everything that does not change is encoded once, a chunk joins bytes.

    With many streams, encoding a dictionary for each chunk would be a good part of a step: see docs/log.md, 2026-11-21.
    """

    def __init__(
        self,
        *,
        reply_id: str,
        kind: str,
        created: int,
        model: str,
        field: str,
        num_choices: int,
        include_usage: bool,
    ) -> None:
        head = msgspec.json.encode({"id": reply_id, "object": kind, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        name = msgspec.json.encode(field)
        self._heads = [self._head + b'{"index":%d,%b:' % (index, name) for index in range(num_choices)]
        self._end = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._plain_tail = self._tail(b"null", None)

    def choice(
        self, index: int, payload: bytes, logprobs: bytes | None = None, finish_reason: str | None = None
    ) -> bytes:
        """A chunk for one choice; payload and log-probabilities are JSON. Empty where it would tell nothing."""
        if logprobs is None and finish_reason is None:  # nearly all are
            return self._heads[index] + payload + self._plain_tail if payload != NOTHING else b""
        return self._heads[index] + payload + self._tail(logprobs or b"null", finish_reason)

    def _tail(self, logprobs: bytes, finish_reason: str | None) -> bytes:
        return b',"logprobs":%b,"finish_reason":%b%b' % (logprobs, msgspec.json.encode(finish_reason), self._end)

    def ledger(self, ledgers: bytes) -> bytes:
        """The chunk that says where the time of each choice went, as JSON, and has no choices."""
        return self._head + b'],"roseinfer_ledger":' + ledgers + self._end[2:]

    def usage(self, usage: bytes) -> bytes:
        """The chunk that carries the usage, as JSON, and no choices."""
        return self._head + b'],"usage":' + usage + b"}\n\n"
