"""Turns JSON payloads into server-sent events. Knows neither what they say nor when they are due."""

import msgspec
from aiohttp import web

DONE = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    """One event; `payload` is JSON and so holds no line break."""
    return b"data: " + payload + b"\n\n"


async def open_stream(request: web.Request) -> web.StreamResponse:
    """Send the status line and the headers of an event stream."""
    stream = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # nginx would hold events back to fill its buffer
        }
    )
    await stream.prepare(request)
    return stream


class ChunkTemplate:
    """The chunks of one stream: everything that does not change is encoded once, a chunk joins bytes.

    With many streams, encoding a dictionary for each chunk would be a good part of a step: see docs/log.md, 2026-11-21.
    """

    def __init__(self, *, reply_id: str, kind: str, created: int, model: str, field: str, include_usage: bool) -> None:
        head = msgspec.json.encode({"id": reply_id, "object": kind, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._field = b',"' + field.encode() + b'":'
        self._tail = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"

    def choice(self, index: int, payload: bytes, logprobs: bytes, finish_reason: bytes) -> bytes:
        """A chunk for one choice; all but `index` are JSON."""
        return b"".join(
            (
                self._head,
                b'{"index":%d' % index,
                self._field,
                payload,
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                finish_reason,
                self._tail,
            )
        )

    def usage(self, usage: bytes) -> bytes:
        """The chunk that carries the usage, as JSON, and no choices."""
        return self._head + b'],"usage":' + usage + b"}\n\n"
