"""Reads the body of a request within its limits of bytes and time, and counts the values in a long one.

Decoding and checking a value takes some tens of nanoseconds, in which no other thread of the process runs: a body of
two megabytes can hold a million, and would hold up every stream and probe for a tenth of a second. So the values of a
long body are counted first, which takes a few milliseconds in steps, and more than the model's context needs are
refused.
"""

import asyncio
from collections.abc import Iterable
from itertools import accumulate

import msgspec
from aiohttp import web

from roseinfer.errors import (
    BodyTimeout,
    BodyTooLarge,
    InvalidRequest,
    MalformedRequest,
    PromptTooLong,
    RequestError,
)
from roseinfer.server.connection.body_budget import HELD_BYTES
from roseinfer.server.port import PORT

INLINE_BYTES = 64 * 1024  # a longer body takes a good part of a millisecond to parse
MAX_LEVELS = 512  # of objects and arrays in a body: the stack bears twice as many, so what is read can be written
_LEVELS = dict(zip(b"[{]}", (1, 1, -1, -1), strict=True))  # that a bracket adds
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in _LEVELS)
FEW_VALUES = 1 << 16  # beside those of prompts as long as the context: 64 prompts of a thousand token ids


async def refuse_body(request: web.Request) -> None:
    """For a path that takes no body. Raises InvalidRequest at its first byte, or BodyTimeout."""
    if not request.body_exists:
        return
    try:
        await read_bytes(request, 0, request.app[PORT].config.body_timeout_s)
    except BodyTooLarge:
        raise InvalidRequest(f"{request.method} {request.path} takes no body.", param="body") from None


async def read_bytes(request: web.Request, limit: int, timeout_s: float, param: str | None = None) -> bytearray:
    """The bytes of a body, which count as held. Raises BodyTooLarge, BodyTimeout, MalformedRequest or Overloaded.

    `param` names the body in an error, where all of it is one thing.
    """

    def too_large() -> BodyTooLarge:  # made where it is raised: in a variable it would keep this frame
        return BodyTooLarge(f"The body is longer than {limit} bytes.", param=param)

    if (request.content_length or 0) > limit:
        raise too_large()
    raw = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.content.iter_any():
                raw += piece
                if len(raw) > limit:
                    raise too_large()
                if len(raw) > INLINE_BYTES:  # the number of connections bounds short ones
                    request[HELD_BYTES].hold(len(raw))
    except TimeoutError:
        raise BodyTimeout(f"The body did not arrive within {timeout_s:g} s.") from None
    except web.RequestPayloadError:
        raise MalformedRequest("This cannot be read as an HTTP request: its body is badly framed.") from None
    return raw


def check_num_values(raw: bytes | bytearray, max_model_len: int) -> None:
    """Raise PromptTooLong or InvalidRequest where a body holds more values than FEW_VALUES and two contexts."""
    limit = FEW_VALUES + 2 * max_model_len
    if _num_separators(raw) > limit and _num_values(raw, limit) > limit:
        raise _too_many_values(raw, limit, max_model_len)


def check_num_values_within(texts: Iterable[tuple[str, str]], max_model_len: int) -> None:
    """Raise InvalidRequest where the JSON texts in a body, each behind its name, hold as many values together.

    They cannot be counted before the body is decoded: there a bracket may be written as six characters.
    """
    limit = FEW_VALUES + 2 * max_model_len
    raws = {name: text.encode(errors="surrogatepass") for name, text in texts}
    if sum(map(_num_separators, raws.values())) <= limit:
        return
    if sum(_num_values(raw, limit) for raw in raws.values()) > limit:
        name = max(raws, key=lambda name: len(raws[name]))
        message = f"`{name}` is too long: all the JSON in the texts of a body holds at most {limit} values."
        raise InvalidRequest(message, param=name)


def _num_separators(json: bytes | bytearray) -> int:
    """At least the number of values in it, less one, if it is JSON: each but the first follows one of these."""
    return json.count(b",") + json.count(b"[") + json.count(b"{")


def check_levels(raw: bytes | bytearray) -> None:
    """Raise InvalidRequest where a body with this number of values is nested deeper than MAX_LEVELS."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_LEVELS:
        return
    brackets = _outside_texts(_bare(raw)).translate(None, _NO_BRACKETS)
    if max(accumulate(map(_LEVELS.__getitem__, brackets)), default=0) > MAX_LEVELS:
        raise InvalidRequest(f"The body is nested too deeply: more than {MAX_LEVELS} levels.")


def _num_values(raw: bytes | bytearray, limit: int) -> int:
    """The number of separators outside of texts; any number above the limit stands for more."""
    bare = _bare(raw)
    if bare.count(b'"') > 4 * limit:  # each value has a text for a name at most, and may be one
        return limit + 1
    return _num_separators(_outside_texts(bare))


def _bare(raw: bytes | bytearray) -> bytes | bytearray:
    """The JSON without escapes, so that every quotation mark begins or ends a text."""
    return raw.replace(b"\\\\", b"").replace(b'\\"', b"")


def _outside_texts(bare: bytes | bytearray) -> bytes:
    return b"".join(bare.split(b'"')[::2])


def _too_many_values(raw: bytes | bytearray, limit: int, max_model_len: int) -> RequestError:
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return InvalidRequest("The body must be a JSON object.")
    except (ValueError, RecursionError):
        return InvalidRequest("The body is not valid JSON, or nested too deeply.")
    name = max(fields, key=lambda name: len(memoryview(fields[name])))
    head = bytes(memoryview(fields[name])[:64]).translate(None, b" \t\r\n")
    if name == "prompt" and head[1:2].isdigit():
        message = f"{PromptTooLong.limit(max_model_len)}; those of `prompt` do not fit."
        return PromptTooLong(message, param=name)
    return InvalidRequest(f"`{name}` is too long: a body holds at most {limit} values.", param=name)
