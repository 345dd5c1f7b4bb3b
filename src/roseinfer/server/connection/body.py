"""Turns the bytes of an HTTP request into a validated body. Knows no endpoint."""

import asyncio
import time

from aiohttp import web

from roseinfer.errors import BodyTimeout, BodyTooLarge, InvalidRequest, MalformedRequest, NotJSON, UnknownModel
from roseinfer.server.connection.body_budget import PLACE
from roseinfer.server.connection.long_body import check_num_values, check_num_values_within
from roseinfer.server.exchange import EXCHANGE
from roseinfer.server.openai.parsing import BodyT, parse_body
from roseinfer.server.openai.schema import GenerationBody
from roseinfer.server.service import SERVICE

INLINE_BYTES = 64 * 1024  # a longer body takes a good part of a millisecond to parse


async def read_body(request: web.Request, body_type: type[BodyT]) -> BodyT:
    """Step 2.

    Raises NotJSON, BodyTooLarge, BodyTimeout, MalformedRequest, InvalidRequest, PromptTooLong, UnknownModel or
    Overloaded.
    """
    service = request.app[SERVICE]
    _check_media_type(request)
    raw = await read_bytes(request, service.config.max_body_bytes, service.config.body_timeout_s)
    if len(raw) <= INLINE_BYTES:
        body = parse_body(raw, body_type)
    else:
        body = await service.long_bodies.do(_parse_long, raw, body_type, service.client.info.max_model_len)
    if body.model not in {None, service.model_name}:
        raise UnknownModel(
            f"The model `{body.model}` does not exist here; this is {service.model_name}.", param="model"
        )
    if (exchange := request.get(EXCHANGE)) is not None:
        exchange.timelines[0].parsed_ns = time.monotonic_ns()
        assert isinstance(body, GenerationBody), "an exchange is about tokens"
        config = service.config
        exchange.set_deadlines(
            body.timeout_s or config.request_timeout_s, body.queue_timeout_s or config.queue_timeout_s
        )
    return body


async def refuse_body(request: web.Request) -> None:
    """For a path that takes none. Raises InvalidRequest for a single byte of it, or BodyTimeout."""
    if not request.body_exists:
        return
    try:
        await read_bytes(request, 0, request.app[SERVICE].config.body_timeout_s)
    except BodyTooLarge:
        raise InvalidRequest(f"{request.method} {request.path} takes no body.", param="body") from None


def _parse_long(raw: bytearray, body_type: type[BodyT], max_model_len: int) -> BodyT:
    check_num_values(raw, max_model_len)
    body = parse_body(raw, body_type)
    check_num_values_within(body.json_texts(), max_model_len)
    return body


def _check_media_type(request: web.Request) -> None:
    if request.content_type != "application/json":
        raise NotJSON("The body must be JSON, with the header Content-Type: application/json.")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise NotJSON(f"Compressed bodies are not read (Content-Encoding: {encoding}).")


async def read_bytes(request: web.Request, limit: int, timeout_s: float, param: str | None = None) -> bytearray:
    """A body as it came, which holds its room. Raises BodyTooLarge, BodyTimeout, MalformedRequest or Overloaded.

    `param` is what the body is called, where all of it is one thing.
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
                _hold(request, len(raw))
    except TimeoutError:
        raise BodyTimeout(f"The body did not arrive within {timeout_s:g} s.") from None
    except web.RequestPayloadError:
        raise MalformedRequest("This cannot be read as an HTTP request: its body is badly framed.") from None
    return raw


def _hold(request: web.Request, num_bytes: int) -> None:
    """Short bodies are bounded by the number of connections."""
    if num_bytes > INLINE_BYTES:
        request[PLACE].hold(num_bytes)
