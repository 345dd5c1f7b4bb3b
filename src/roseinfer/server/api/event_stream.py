"""Writes server-sent events: chunks from a template, keep-alive comments, and the head of a stream."""

import asyncio
import time
from collections.abc import Callable, Coroutine

import msgspec
from aiohttp import web

DONE = b"data: [DONE]\n\n"
NOTHING = b"{}"  # an empty payload
COMMENT = b": keep-alive\n\n"  # what begins with a colon is no event, and clients skip it


def event(payload: bytes) -> bytes:
    """One event; `payload` is JSON and so holds no line break."""
    return b"data: " + payload + b"\n\n"


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


class ChunkTemplate:
    """Encodes what does not change in the chunks of a stream once; a chunk joins bytes.

    With many streams, encoding a dictionary for each chunk would take a good part of a step: docs/log.md, 2026-11-21.
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
        self,
        index: int,
        payload: bytes,
        logprobs: bytes | None = None,
        finish_reason: str | None = None,
        usage: bytes | None = None,
    ) -> bytes:
        """A chunk of one choice, from JSON; empty if it would add neither payload, log-probabilities nor an end."""
        if logprobs is None and finish_reason is None:  # nearly all are
            if payload == NOTHING:
                return b""
            if usage is None:
                return self._heads[index] + payload + self._plain_tail
        return self._heads[index] + payload + self._tail(logprobs or b"null", finish_reason, usage)

    def _tail(self, logprobs: bytes, finish_reason: str | None, usage: bytes | None = None) -> bytes:
        end = self._end if usage is None else b'}],"usage":%b}\n\n' % usage
        return b',"logprobs":%b,"finish_reason":%b%b' % (logprobs, msgspec.json.encode(finish_reason), end)

    def ledger(self, ledgers: bytes) -> bytes:
        """The chunk with the ledgers of all choices, in JSON, and no choices."""
        return self._head + b'],"roseinfer_ledger":' + ledgers + self._end[2:]

    def usage(self, usage: bytes) -> bytes:
        """The chunk with the usage, in JSON, and no choices."""
        return self._head + b'],"usage":' + usage + b"}\n\n"
