"""Follows one HTTP request for tokens: its timelines, deadlines, interruptions, and how it ends."""

import asyncio
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from aiohttp import web
from aiohttp.typedefs import Handler

from roseinfer.engine.link.engine_client import EngineClient
from roseinfer.errors import EngineError, InvalidRequest, QueueTimeout, RequestTimeout, RoseinferError
from roseinfer.records import Api, FinishReason, RequestTimeline
from roseinfer.server.connection.api_keys import Caller

Ledgers = Callable[[Sequence[RequestTimeline], int], Awaitable[list[dict[str, object]]]]
"""The time of requests in flight up to a moment, in nanoseconds of the monotonic clock, ready for JSON."""

Failure = Callable[[RoseinferError, list[dict[str, object]] | None], bytes]
"""Encodes an error, and the ledgers of a client that asked for them, in the form of an API."""

LEDGER_HEADER = "x-roseinfer-ledger"
INTENDED_TIME_HEADER = "x-roseinfer-intended-time"
ENGINE_GRACE_S = 0.5  # several steps: within them the engine ends a request itself, and has its own count of it
_UNIX_SECONDS = re.compile(r"\d{1,12}(\.\d{1,12})?")

HEAD_NS = web.RequestKey("head_ns", int)
"""When the head of the request was parsed: its handler begins later, where the event loop has others to serve."""

_apis: dict[Handler, Api] = {}


def generates_tokens(api: Api) -> Callable[[Handler], Handler]:
    """Mark a handler whose requests are exchanges, and name its API."""

    def mark(handler: Handler) -> Handler:
        _apis[handler] = api
        return handler

    return mark


def is_for_tokens(request: web.Request) -> bool:
    """Whether a marked handler will answer the request."""
    return request.match_info.handler in _apis


def _trace_header(request: web.Request, name: str) -> str:
    """All fields of this name as one; empty where it is not of ASCII, as the standards demand.

    Bytes that are no UTF-8 are lone surrogates here, which no message can carry.
    """
    text = ",".join(request.headers.getall(name, ()))
    return text if text.isascii() else ""


class Exchange:
    """One request for tokens, with a timeline for each sequence that it generates and at least one.

    The first timeline opens at construction and the others at `submit`; all close at `close`.
    """

    def __init__(self, client: EngineClient, key: str, request: web.Request, ledgers: Ledgers) -> None:
        self.timelines = [
            RequestTimeline(
                request_id=key,
                recv_ns=request[HEAD_NS],
                api=_apis[request.match_info.handler],
                traceparent=_trace_header(request, "traceparent"),
                tracestate=_trace_header(request, "tracestate"),
                baggage=_trace_header(request, "baggage"),
            )
        ]
        self.stream: web.StreamResponse | None = None  # the answer, once its status line is on its way
        self.reply_id = ""  # the id in the answer
        self.failure_frames: Failure | None = None  # what its stream ends with if it fails
        self.caller: Caller | None = None  # by its key, where keys are configured
        self.deadline_ns: int | None = None  # by when it must have ended, on the monotonic clock
        self.queue_deadline_ns: int | None = None  # by when the engine must have begun
        self._recv_unix_s = time.time() - (time.monotonic_ns() - request[HEAD_NS]) / 1e9
        self._intended_time = request.headers.get(INTENDED_TIME_HEADER)
        self._ledgers = ledgers
        self._asks_for_ledger = request.headers.get(LEDGER_HEADER)
        self._client = client
        self.key = key  # names the exchange among those in flight
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._interruption: RoseinferError | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self.is_submitted = False  # to the engine
        client.open_timeline(self.timelines[0])

    @property
    def is_in_engine(self) -> bool:
        """Whether the engine has not ended each sequence: an abort may be on its way."""
        return any(self._client.holds(timeline.request_id) for timeline in self.timelines)

    def sequence_id(self, index: int) -> str:
        """The engine's id of one of its sequences; `/` is in no key, so no two exchanges share one."""
        return f"{self.key}/{index}" if index else self.key

    async def fetch_ledgers(self) -> list[dict[str, object]] | None:
        """Where the time of each sequence went up to now; None where the client did not ask."""
        if not self.wants_ledgers:
            return None
        return await self._ledgers(self.timelines, time.monotonic_ns())

    async def opening_timing(self) -> dict[str, str]:
        """The header of a stream: up to its first token only, since causes of later gaps may be long in coming."""
        if not self.wants_ledgers:
            return {}
        timeline = self.timelines[0]
        first = replace(timeline, token_ns=timeline.token_ns[:1], arrivals=timeline.arrivals[:1])
        return server_timing(await self._ledgers([first], time.monotonic_ns()))

    @property
    def wants_ledgers(self) -> bool:
        return self._asks_for_ledger == "1"

    def read_headers(self) -> None:
        """Read whether the client wants a ledger, and how late it sent the request. Raises InvalidRequest."""
        if self._asks_for_ledger not in {None, "0", "1"}:
            raise InvalidRequest(f"The header {LEDGER_HEADER} is 1, or 0, or left out.", param=LEDGER_HEADER)
        if self._intended_time is None:
            return
        if not _UNIX_SECONDS.fullmatch(self._intended_time):
            raise InvalidRequest(
                f"The header {INTENDED_TIME_HEADER} takes unix seconds, such as 1700000000.25.",
                param=INTENDED_TIME_HEADER,
            )
        self.timelines[0].client_submit_lag_s = self._recv_unix_s - float(self._intended_time)

    def submit(self, prompt_lengths: Sequence[int], *, is_streamed: bool) -> None:
        """Open a timeline for each sequence, whose prompts have these lengths, as they go to the engine."""
        first = self.timelines[0]
        for index in range(1, len(prompt_lengths)):
            timeline = RequestTimeline(
                request_id=self.sequence_id(index),
                recv_ns=first.recv_ns,
                parsed_ns=first.parsed_ns,
                tokenized_ns=first.tokenized_ns,
                client_submit_lag_s=first.client_submit_lag_s,
                api=first.api,
                traceparent=first.traceparent,
                tracestate=first.tracestate,
                baggage=first.baggage,
                trace_id=first.trace_id,  # all of one HTTP request is one trace
            )
            self._client.open_timeline(timeline)
            self.timelines.append(timeline)
        for timeline, length in zip(self.timelines, prompt_lengths, strict=True):
            timeline.num_prompt_tokens = length
            timeline.is_streamed = is_streamed
        self.is_submitted = True
        self._unset_alarm()
        if self.deadline_ns is not None:
            error = RequestTimeout("The request ran past its deadline, `timeout_s`.", param="timeout_s")
            self._set_alarm(self.deadline_ns + int(ENGINE_GRACE_S * 1e9), error)

    def cache_salt(self, given: str) -> str:
        """The salt of its cached prefixes: the key's own, which a salt that the client gives can only narrow."""
        own = self.caller.cache_salt if self.caller is not None else ""
        return hmac.digest(own.encode(), given.encode("utf-8", "surrogatepass"), "sha256").hex()[:32] if given else own

    def set_deadlines(self, timeout_s: float, queue_timeout_s: float) -> None:
        """Set when it must have ended and when the engine must have begun, in seconds from its head; 0: never.

        The handler is interrupted at the sooner of them. From `submit` on the engine keeps them, and the handler is
        interrupted only if the engine does not.
        """
        recv_ns = self.timelines[0].recv_ns
        self.deadline_ns = recv_ns + int(timeout_s * 1e9) if timeout_s else None
        self.queue_deadline_ns = recv_ns + int(queue_timeout_s * 1e9) if queue_timeout_s else None
        given = [deadline_ns for deadline_ns in (self.deadline_ns, self.queue_deadline_ns) if deadline_ns is not None]
        if given:
            message = "The request could not be made ready for the engine in the time it was given."
            self._set_alarm(min(given), QueueTimeout(message, param=self.waits_by))

    @property
    def waits_by(self) -> str:
        """The field that ends it first while the engine has not begun."""
        queue_ns, whole_ns = self.queue_deadline_ns, self.deadline_ns
        is_whole = queue_ns is None or (whole_ns is not None and whole_ns < queue_ns)
        return "timeout_s" if is_whole else "queue_timeout_s"

    def _set_alarm(self, at_ns: int, error: RoseinferError) -> None:
        delay_s = max(0.0, (at_ns - time.monotonic_ns()) / 1e9)
        self._alarm = asyncio.get_running_loop().call_later(delay_s, self.interrupt, error)

    def _unset_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def interrupt(self, error: RoseinferError) -> None:
        """Stop the handler where it is, and end with `error`."""
        if self._interruption is None:
            self._interruption = error
            self._task.cancel()

    def interruption(self) -> RoseinferError | None:
        """Why `interrupt` cancelled the handler, if it did; takes the cancellation back."""
        if self._interruption is not None:
            self._task.uncancel()
        return self._interruption

    def fail(self, error: RoseinferError) -> None:
        """End the sequences that have not finished with `error`; nothing interrupts from here on."""
        self._interruption = self._interruption or error
        if not self.is_submitted:
            self._finish(FinishReason.REJECTED, error.public_code)
        elif isinstance(error, RequestTimeout):
            self._finish(FinishReason.TIMEOUT, error.code or "")
        elif isinstance(error, EngineError) or error.code is None:
            self._finish(FinishReason.ERROR, error.public_code)
        else:
            self._finish(FinishReason.ABORT, error.code)

    def lose_client(self) -> None:
        """Note that the client has gone."""
        for timeline in self.timelines:
            timeline.client_disconnected = True
        self._finish(FinishReason.ABORT, "")

    def _finish(self, reason: FinishReason, error_code: str) -> None:
        for timeline in self.timelines:
            if timeline.finish_reason is None:
                timeline.finish_reason = reason
                timeline.error_code = error_code

    def close(self) -> None:
        self._unset_alarm()
        end_ns = time.monotonic_ns()
        for timeline in self.timelines:
            timeline.end_ns = end_ns
            self._client.close_timeline(timeline)


def server_timing(ledgers: list[dict[str, object]] | None) -> dict[str, str]:
    """The header Server-Timing (https://www.w3.org/TR/server-timing/): the parts of the first ledger in ms."""
    if ledgers is None:
        return {}
    parts = ledgers[0]["parts_ns"]
    assert isinstance(parts, dict)
    return {"Server-Timing": ", ".join(f"{name};dur={duration / 1e6:.3f}" for name, duration in parts.items())}


EXCHANGE = web.RequestKey("exchange", Exchange)
