"""Turns whatever happens around a handler into what the client and the log are told. Knows no bodies."""

import asyncio
import contextlib
import logging
import re
import time
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler

from roseinfer.errors import (
    CapacityError,
    MalformedRequest,
    MethodNotAllowed,
    QueueTimeout,
    RoseinferError,
    Unauthorized,
    UnknownRoute,
)
from roseinfer.records import LifecycleState
from roseinfer.server.connection.api_keys import Caller
from roseinfer.server.connection.body_budget import HELD_BYTES, HeldBytes
from roseinfer.server.exchange import EXCHANGE, is_for_tokens
from roseinfer.server.openai import event_stream as sse
from roseinfer.server.openai.replies import error_body, server_timing
from roseinfer.server.service import SERVICE

REQUEST_ID = web.RequestKey("request_id", str)
CALLER = web.RequestKey("caller", Caller)  # where keys are configured
REQUEST_ID_HEADER = "x-request-id"
PROBE_PATHS = frozenset({"/livez", "/readyz", "/startupz", "/health"})
QUIET_PATHS = PROBE_PATHS | {
    "/metrics",
    "/debug/timeline/data",
}  # asked every second; what they would say, the lifecycle logs
SERVER = "roseinfer"  # in the place of aiohttp's and Python's versions
CLIENT_CLOSED = 499  # nginx's number for it
REASONS = {CLIENT_CLOSED: "Client Closed Request"}  # of statuses that the standard has no phrase for
RESTART_S = "5"  # until an engine that has died is there again, if it comes back; nobody can count on its backlog
FAREWELL_TIMEOUT_S = 1.0  # a client that does not read is not waited for with the last event

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_access_log = logging.getLogger("roseinfer.access")
_log = logging.getLogger(__name__)


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Step 1: give the request its id, and the log one line when it has ended."""
    request[REQUEST_ID] = request_id_of(request)
    start = time.monotonic()
    status = CLIENT_CLOSED
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        level = logging.DEBUG if request.path in QUIET_PATHS else logging.INFO
        _access_log.log(
            level,
            "request",
            extra={
                "request_id": request[REQUEST_ID],
                "method": request.method,
                "path": request.path,
                "status": status,
                "duration_ms": round((time.monotonic() - start) * 1e3, 3),
                "trace_id": _trace_id(request),
                "api_key": request[CALLER].name if CALLER in request else None,
            },
        )


def request_id_of(request: web.BaseRequest) -> str:
    """The one that the client gave, if it has an acceptable form, or a new one."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _trace_id(request: web.Request) -> str | None:
    exchange = request.get(EXCHANGE)
    return (exchange.timelines[0].trace_id or None) if exchange is not None else None


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Runs before a status line leaves: the request id, and `Connection: close` on a server that is about to go."""
    response.headers["Server"] = SERVER
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
    if request.app[SERVICE].state in {LifecycleState.DRAINING, LifecycleState.FAILED}:
        response.headers["Connection"] = "close"
        response.force_close()


@web.middleware
async def release_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Release what a long body holds when its request has its answer."""
    held = request[HELD_BYTES] = HeldBytes(request.app[SERVICE].body_budget)
    try:
        return await handler(request)
    finally:
        held.release()


@web.middleware
async def open_exchange(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Step 1, for requests for tokens: open a timeline at the first byte and close it after the last (step 15)."""
    if not is_for_tokens(request):
        return await handler(request)
    service = request.app[SERVICE]
    exchange = request[EXCHANGE] = service.open_exchange(request, request[REQUEST_ID])
    try:
        return await handler(request)
    except asyncio.CancelledError:  # aiohttp cancels the handler of a client that has gone
        exchange.lose_client()
        raise
    finally:
        service.close_exchange(exchange)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The one translator: any error becomes the JSON body or, when the status line is out, the stream's last event."""
    exchange = request.get(EXCHANGE)
    headers: dict[str, str] = {}
    failure: RoseinferError
    try:
        return await handler(request)
    except RoseinferError as error:
        failure = error
    except web.HTTPException as error:  # the router's: 404, 405
        kind = MethodNotAllowed if error.status == MethodNotAllowed.status else UnknownRoute
        failure = kind(f"{error.reason}: {request.method} {request.path}")
        headers.update({"Allow": error.headers["Allow"]} if "Allow" in error.headers else {})
    except ConnectionError:
        if exchange is None:
            raise
        exchange.lose_client()
        return exchange.stream or web.Response(status=CLIENT_CLOSED)  # nobody reads it but the log
    except asyncio.CancelledError:
        interruption = exchange.interruption() if exchange is not None else None
        if interruption is None:
            raise
        failure = interruption
    except Exception:  # noqa: BLE001 - one of the three places that catch all: it is logged, and told as ours
        _log.exception("unexpected error", extra={"request_id": request[REQUEST_ID]})
        failure = RoseinferError("Something went wrong inside the server; its log says more under this request's id.")
    # Its frames, and those of what it came from, know what was asked and it: all would stay until a collection.
    failure.__traceback__ = failure.__context__ = None
    if isinstance(failure, QueueTimeout):
        failure.retry_after_s = request.app[SERVICE].client.queue_estimate.retry_after_s(priority=0)
    _tell(request, failure)
    if exchange is not None and exchange.stream is not None:
        return await _end_stream(request, exchange.stream, failure)
    ledgers = exchange.ledgers() if exchange is not None and exchange.wants_ledger else None
    return error_response(failure, headers, ledgers)


def _tell(request: web.Request, failure: RoseinferError) -> None:
    """End its exchange, if it has one. What the engine has not heard of is a refusal, and counts as one."""
    exchange = request.get(EXCHANGE)
    if exchange is not None:
        exchange.fail(failure)
    if exchange is None or not exchange.is_submitted:
        request.app[SERVICE].observer.on_refusal(failure.public_code)


def error_response(
    error: RoseinferError,
    headers: dict[str, str] | None = None,
    ledgers: list[dict[str, object]] | None = None,
) -> web.Response:
    """The JSON body of an error, under its status."""
    response = web.Response(
        status=error.status,
        reason=REASONS.get(error.status),
        body=error_body(error, ledgers),
        content_type="application/json",
        headers=headers,
    )
    response.headers["Server"] = SERVER
    if ledgers is not None:
        response.headers["Server-Timing"] = server_timing(ledgers)
    if isinstance(error, CapacityError | QueueTimeout):
        response.headers["Retry-After"] = str(error.retry_after_s)
    elif error.status == 503:
        response.headers["Retry-After"] = RESTART_S
    elif isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = error.challenge
    if error.status in {408, 413, 415}:
        response.force_close()  # the rest of the body is not read
    return response


async def _end_stream(request: web.Request, stream: web.StreamResponse, error: RoseinferError) -> web.StreamResponse:
    """An error event and the end of the stream, without `[DONE]`."""
    stream.force_close()
    if isinstance(stream, web.Response):  # a whole answer, cut in the middle: nothing can be added to it
        _abort(request)
        return stream
    with contextlib.suppress(ConnectionError, TimeoutError):
        if not request.protocol.writing_paused:  # else its buffers are full, and aiohttp's waiter for them is spent
            async with asyncio.timeout(FAREWELL_TIMEOUT_S):
                exchange = request[EXCHANGE]
                ledgers = exchange.ledgers() if exchange.wants_ledger else None
                await stream.write(sse.event(error_body(error, ledgers)))
                await stream.write_eof()
                return stream
    _abort(request)
    return stream


def _abort(request: web.Request) -> None:
    """Drop the connection of a client that does not read: closing politely would wait until it does."""
    if request.transport is not None:
        request.transport.abort()


@web.middleware
async def refuse_odd_heads(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A head that two readers could take for two different requests is nobody's."""
    if len(request.headers.getall("Host", ())) > 1:
        raise MalformedRequest("The header Host comes more than once.", param="Host")
    if not request.raw_path.startswith(("/", "*")):
        raise MalformedRequest("The target must be a path; this server is no proxy.")
    if request.headers.get("Transfer-Encoding", "chunked").lower() != "chunked":
        raise MalformedRequest("No transfer coding but `chunked` is read.", param="Transfer-Encoding")
    return await handler(request)


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """With keys configured, everything but the probes needs one, whether or not it exists."""
    keys = request.app[SERVICE].api_keys
    if keys is not None and request.path not in PROBE_PATHS:
        caller = keys.caller(request.headers.get("Authorization", ""))
        if caller is None:
            raise Unauthorized("A valid API key is needed: `Authorization: Bearer <key>`.")
        request[CALLER] = caller
        if (exchange := request.get(EXCHANGE)) is not None:
            exchange.caller = caller  # what one key has cached cannot be probed with another
    return await handler(request)


@web.middleware
async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Requests for tokens are refused while the server is not ready or is full."""
    if (exchange := request.get(EXCHANGE)) is not None:
        request.app[SERVICE].admit()
        exchange.read_headers()
    return await handler(request)
