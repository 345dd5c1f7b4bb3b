"""Writes server-sent events: the head of a stream, events, and keep-alive comments."""

import asyncio
import time
from collections.abc import Callable, Coroutine

from aiohttp import HttpVersion11, web

# Line ends of Unicode, which JSON leaves as they are: clients that split text into lines, as httpx does, end one there.
_LINE_ENDS = {char.encode(): b"\\u%04x" % ord(char) for char in "\x85\u2028\u2029"}
COMMENT = b": keep-alive\n\n"  # what begins with a colon is no event, and clients skip it


def event(payload: bytes, name: str | None = None) -> bytes:
    """One event, with its name in APIs that name theirs; `payload` is JSON and so holds no line break."""
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return head + b"data: " + payload + b"\n\n"


def escape_line_ends(events: bytes) -> bytes:
    """Events whose lines end nowhere but at their line feeds, however a client splits them."""
    if not events.isascii():  # few are not
        for end, escape in _LINE_ENDS.items():
            events = events.replace(end, escape)
    return events


async def open_stream(request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
    """Send the status line and the headers of an event stream."""
    stream = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # nginx would hold events back to fill its buffer
            **headers,
        }
    )
    if request.version < HttpVersion11:
        stream.force_close()  # without chunks only the connection's end says where the stream ends
    await stream.prepare(request)
    return stream


class Beacon:
    """Sends a keep-alive comment after each interval without an event, even before the first.

    Its one timer checks when the last event was, so an event costs one assignment, to `last_s`.
    """

    def __init__(self, interval_s: float, send: Callable[[], Coroutine[None, None, None]]) -> None:
        self.last_s = time.monotonic()  # of the last event
        self._interval_s = interval_s
        self._send = send
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._look) if interval_s else None

    def _look(self) -> None:
        left_s = self.last_s + self._interval_s - time.monotonic()
        if left_s <= 0:
            self.last_s, left_s = time.monotonic(), self._interval_s
            self._task = asyncio.create_task(self._send())
        self._timer = asyncio.get_running_loop().call_later(left_s, self._look)

    async def stop(self) -> None:
        """Send no more comments; one that is being sent is completed."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            await asyncio.wait({self._task})
