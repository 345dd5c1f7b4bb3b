"""Wraps each handler: request ids, the access log, errors as JSON, API keys, CORS, admission, and odd heads."""

import asyncio
import contextlib
import difflib
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import quote

from aiohttp import web
from aiohttp.typedefs import Handler

from roseinfer.errors import (
    CapacityError,
    CrossSite,
    MalformedRequest,
    MethodNotAllowed,
    QueueTimeout,
    RoseinferError,
    Unauthorized,
    UnknownRoute,
)
from roseinfer.records import LifecycleState
from roseinfer.server.api.errors import error_body
from roseinfer.server.api.event_stream import escape_line_ends
from roseinfer.server.api.parsing import IGNORED
from roseinfer.server.connection.api_keys import NO_KEY, Caller
from roseinfer.server.connection.body_budget import HELD_BYTES, HeldBytes
from roseinfer.server.exchange import EXCHANGE, HEAD_NS, Failure, is_for_tokens, server_timing
from roseinfer.server.port import PORT
from roseinfer.server.service import SERVICE

ACCESS_LOG = logging.getLogger("roseinfer.access")
REQUEST_ID = web.RequestKey("request_id", str)
CALLER = web.RequestKey("caller", Caller)  # where keys are configured
ErrorForm = Callable[[str], Failure]  # of the errors of the request with an id
ERROR_FORMS = web.AppKey("error_forms", Mapping[str, ErrorForm])  # of APIs with their own, by the beginning of the path
FAILURE = web.RequestKey("failure", RoseinferError)  # that ended it
REQUEST_ID_HEADER = "x-request-id"
PROBE_PATHS = frozenset({"/livez", "/readyz", "/startupz", "/health", "/ping"})
# Requested every second; the lifecycle logs what they would show.
QUIET_PATHS = PROBE_PATHS | {"/metrics", "/metrics/load", "/debug/timeline/data"}
SERVER = "roseinfer"  # instead of the versions of aiohttp and Python
CLIENT_CLOSED = 499  # nginx's number for it
REASONS = {CLIENT_CLOSED: "Client Closed Request"}  # of statuses that the standard has no phrase for
MAX_LISTED = 2048  # characters of the names of fields that were ignored
RESTART_S = "5"  # until a new engine is there, if there will be one; its backlog is not known
PREFLIGHT_AGE_S = "600"  # in which a browser need not ask again
FAREWELL_TIMEOUT_S = 1.0  # for a client that does not read to take the last event

_LIKE = 0.75  # of 1, two paths are alike: `healthz` and `health`, and not `embeddings` and `completions`
_PARAM = re.compile(r"[\w.\[\]-]{1,128}", re.ASCII)  # what a field or a header may be called
_OWN_KEYS = re.compile(r"\b(logit_bias|metadata|chat_template_kwargs)\..*", re.DOTALL)  # whose keys clients choose
_STORED_RESPONSE = re.compile(r"/v1/responses/resp_[^/]*(/cancel|/input_items)?$")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_log = logging.getLogger(__name__)


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Step 1: give the request its id, and log one line when it has ended."""
    request[REQUEST_ID] = request_id_of(request)
    status = CLIENT_CLOSED
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        level = logging.DEBUG if request.path in QUIET_PATHS else logging.INFO
        ACCESS_LOG.log(
            level,
            "request",
            extra={
                "request_id": request[REQUEST_ID],
                "method": request.method,
                "path": request.path,
                "status": status,
                "duration_ms": round((time.monotonic_ns() - request[HEAD_NS]) / 1e6, 3),
                "api_key": request[CALLER].name if CALLER in request else None,
                **_facts_of_exchange(request),
                **_facts_of_failure(request),
            },
        )


def request_id_of(request: web.BaseRequest) -> str:
    """The id that the client gave, if its form is acceptable, or a new one."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _facts_of_exchange(request: web.Request) -> dict[str, str | None]:
    if (exchange := request.get(EXCHANGE)) is None:
        return {}
    first = exchange.timelines[0]
    return {"api": first.api.value, "trace_id": first.trace_id or None}


def _facts_of_failure(request: web.Request) -> dict[str, str | None]:
    """Why the client got an error, without its message, which may quote what the client sent."""
    if (failure := request.get(FAILURE)) is None:
        return {}
    param = _OWN_KEYS.sub(r"\1", failure.param or "")
    return {
        "error": type(failure).__name__,
        "error_code": failure.public_code,
        "param": param if _PARAM.fullmatch(param) else None,
    }


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the request id, what was ignored, and `Connection: close` on a server that is about to stop.

    It is called before the status line leaves.
    """
    response.headers["Server"] = SERVER
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
    if ignored := request.get(IGNORED):
        listed = ", ".join(quote(name, safe="", errors="replace") for name in sorted(ignored))
        response.headers["x-roseinfer-ignored"] = listed[:MAX_LISTED]
    if request.app[PORT].state in {LifecycleState.DRAINING, LifecycleState.FAILED}:
        response.headers["Connection"] = "close"
        response.force_close()


@web.middleware
async def release_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Release what a long body holds when its request has its answer."""
    held = request[HELD_BYTES] = HeldBytes(request.app[PORT].body_budget)
    try:
        return await handler(request)
    finally:
        held.release()


@web.middleware
async def open_exchange(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Open the timeline of a request for tokens at its head (step 1), and close it after its last byte (step 15)."""
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
    """Turn any error into the JSON body or, when the status line is out, into the last event of the stream."""
    exchange = request.get(EXCHANGE)
    headers: dict[str, str] = {}
    failure: RoseinferError
    try:
        return await handler(request)
    except RoseinferError as error:
        failure = error
    except web.HTTPException as error:  # the router's: 404, 405
        kind = MethodNotAllowed if error.status == MethodNotAllowed.status else UnknownRoute
        allowed = error.headers.get("Allow", "")
        hint = _what_is_near(request) if kind is UnknownRoute else f" It takes {allowed.replace(',', ', ')}."
        failure = kind(f"{error.reason}: {request.method} {request.path}.{hint}")
        headers.update({"Allow": allowed} if allowed else {})
    except ConnectionError:
        if exchange is None:
            raise
        exchange.lose_client()
        return exchange.stream or web.Response(status=CLIENT_CLOSED)  # only the log reads it
    except asyncio.CancelledError:
        interruption = exchange.interruption() if exchange is not None else None
        if interruption is None:
            raise
        failure = interruption
    except Exception:  # noqa: BLE001 - one of the three places that catch all: it is logged, and answered with 500
        _log.exception("unexpected error", extra={"request_id": request[REQUEST_ID]})
        failure = RoseinferError("Something went wrong inside the server; its log says more under this request's id.")
    # Its frames refer to the request and to it: all of them would stay until a garbage collection.
    failure.__traceback__ = failure.__context__ = None
    if isinstance(failure, QueueTimeout):
        failure.retry_after_s = request.app[SERVICE].client.queue_estimate.retry_after_s(priority=0)
    _record(request, failure)
    if exchange is not None and exchange.stream is not None:
        return await _end_stream(request, exchange.stream, failure)
    ledgers = await exchange.fetch_ledgers() if exchange is not None else None
    return error_response(failure, headers, ledgers, _error_form(request))


def _error_form(request: web.Request) -> Failure:
    """The form of errors of the API that the path belongs to."""
    forms = request.app.get(ERROR_FORMS, {})
    form = next((form for prefix, form in forms.items() if request.path.startswith(prefix)), None)
    return error_body if form is None else form(request[REQUEST_ID])


def _what_is_near(request: web.Request) -> str:
    """The path that was meant, if one is misspelled or has a wrong beginning; else those that the API has."""
    if _STORED_RESPONSE.match(request.path):
        return " Responses are not stored here: send the items that go on with the next request."
    routes = [(route.method, route.resource.canonical) for route in request.app.router.routes() if route.resource]
    paths = [path for _, path in routes]
    of_api = sorted({path for path in paths if path.startswith("/v1/") and "{" not in path})
    near = _path_meant(request.path, of_api + [path for path in paths if not path.startswith("/v1/")])
    if near is None:
        beside = sorted({path for method, path in routes if method == "POST" and not path.startswith("/v1/")})
        return f" There are {', '.join(of_api + beside)}; a client's base URL has /v1 once at most." if of_api else ""
    if near not in of_api:
        return f" There is {near}."
    forms = request.app.get(ERROR_FORMS, {})
    is_openai = not near.startswith(tuple(forms))
    return f" There is {near}. A client's base URL {'ends in' if is_openai else 'is without'} /v1."


def _path_meant(path: str, paths: Sequence[str]) -> str | None:
    """The one that has the same end, whatever is before it; that begins so; or that is spelled almost so."""
    ends = {known.removeprefix("/v1").strip("/"): known for known in paths}
    end = re.sub("^(v1/)+", "", path.strip("/"))
    same = max((known for known in ends if f"/{end}".endswith(f"/{known}")), key=len, default=None)
    begun = (known for known in ends if known.startswith(f"{end}/"))
    alike = difflib.get_close_matches(end, ends, n=1, cutoff=_LIKE)
    found = same or next(begun, None) or next(iter(alike), None)
    return None if found is None else ends[found]


def _record(request: web.Request, failure: RoseinferError) -> None:
    """End the exchange of a failed request; one that never reached the engine counts as a refusal."""
    request[FAILURE] = failure
    exchange = request.get(EXCHANGE)
    if exchange is not None:
        exchange.fail(failure)
    if failure.status == 503 and request.path in QUIET_PATHS:
        return  # metrics that are not there are no request of a client's, and pickers ask for them many times a second
    if exchange is None or not exchange.is_submitted:
        request.app[PORT].observer.on_refusal(failure.public_code)


def error_response(
    error: RoseinferError,
    headers: dict[str, str] | None = None,
    ledgers: list[dict[str, object]] | None = None,
    form: Failure = error_body,
) -> web.Response:
    """The JSON body of an error, under its status."""
    response = web.Response(
        status=error.status,
        reason=REASONS.get(error.status),
        body=form(error, ledgers),
        content_type="application/json",
        headers=headers,
    )
    response.headers["Server"] = SERVER
    response.headers.update(server_timing(ledgers))
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
    """End the stream with an error event, never as if it were whole. Behind it the connection may be used again."""
    exchange = request[EXCHANGE]
    if isinstance(stream, web.Response) or exchange.failure_frames is None:  # no stream of events: nothing can be added
        _abort(request)
        return stream
    ledgers = await exchange.fetch_ledgers()  # may outlast the timeout where the loop had no core
    with contextlib.suppress(ConnectionError, TimeoutError):
        if not request.protocol.writing_paused:  # else its buffers are full, and aiohttp's waiter for them is spent
            async with asyncio.timeout(FAREWELL_TIMEOUT_S):
                await stream.write(escape_line_ends(exchange.failure_frames(error, ledgers)))
                await stream.write_eof()
                return stream
    _abort(request)
    return stream


def _abort(request: web.Request) -> None:
    """Drop the connection of a client that does not read: closing it properly would wait until it does."""
    if request.transport is not None:
        request.transport.abort()


@web.middleware
async def refuse_odd_heads(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a head that two servers could read as two different requests."""
    if len(request.headers.getall("Host", ())) > 1:
        raise MalformedRequest("The header Host comes more than once.", param="Host")
    if not request.raw_path.startswith(("/", "*")):
        raise MalformedRequest("The target must be a path; this server is no proxy.")
    if request.headers.get("Transfer-Encoding", "chunked").lower() != "chunked":
        raise MalformedRequest("No transfer coding but `chunked` is read.", param="Transfer-Encoding")
    return await handler(request)


@web.middleware
async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a CORS preflight: a browser asks, without a key, whether a page of another origin may send a request."""
    wanted = request.headers.get("Access-Control-Request-Method")
    if request.method != "OPTIONS" or wanted is None or not request.app[SERVICE].config.allowed_origins:
        return await handler(request)
    if not _allowed_origin(request):
        raise CrossSite("Pages of this origin may send nothing here (server.allowed_origins).", param="Origin")
    headers = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": PREFLIGHT_AGE_S}
    if names := request.headers.get("Access-Control-Request-Headers"):
        headers["Access-Control-Allow-Headers"] = names  # `*` would not mean Authorization
    return web.Response(status=204, headers=headers)


async def allow_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Let pages of the allowed origins read an answer, streamed or not, and an error."""
    origins = request.app[SERVICE].config.allowed_origins
    if origins and "*" not in origins:
        response.headers.add("Vary", "Origin")
    if origin := _allowed_origin(request):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = (
            "X-Request-Id, Request-Id, Retry-After, Server-Timing, X-Roseinfer-Ignored"
        )


def _allowed_origin(request: web.Request) -> str:
    origins, origin = request.app[SERVICE].config.allowed_origins, request.headers.get("Origin", "")
    return "*" if "*" in origins else origin if origin in origins else ""


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a request without a valid key, where keys are configured and the path is no probe."""
    keys = request.app[SERVICE].api_keys
    if keys is not None and request.path not in PROBE_PATHS:
        caller = keys.caller(request.headers)
        if caller is None:
            raise Unauthorized(f"{NO_KEY}.")
        request[CALLER] = caller
        if (exchange := request.get(EXCHANGE)) is not None:
            exchange.caller = caller  # so that one key cannot probe what another has cached
    return await handler(request)


@web.middleware
async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a request for tokens while the server is not ready or is full."""
    if (exchange := request.get(EXCHANGE)) is not None:
        request.app[SERVICE].admit()
        exchange.read_headers()
    return await handler(request)
