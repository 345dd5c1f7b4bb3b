"""Sends spans to a collector: a bounded queue, a thread, HTTP requests.

Callers never wait: what finds no room, or cannot be delivered, is dropped and counted. The thread gives the
interpreter away after each few spans, so that the event loop waits for it no longer than some hundred microseconds.
"""

import http.client
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from email.message import Message
from urllib.parse import SplitResult, urlsplit

from roseinfer.errors import ConfigError
from roseinfer.observe.tracing import otlp
from roseinfer.observe.tracing.otlp import Encoder
from roseinfer.observe.tracing.spans import Span

logger = logging.getLogger(__name__)

TRACES_PATH = "/v1/traces"
RETRYABLE = frozenset({429, 502, 503, 504})  # as the specification of OTLP/HTTP says
MAX_ATTEMPTS = 5
FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 5.0  # also for a Retry-After
REQUEST_TIMEOUT_S = 5.0
GATHER_S = 0.5  # spans that come within this time of the first go together
MAX_BATCH_SPANS = 256
_SPANS_AT_ONCE = 16  # are encoded in some 0.3 ms
_MAX_ANSWER_BYTES = 1 << 16


class NotDelivered(Exception):
    """One attempt failed; `is_final` when another would fail too."""

    def __init__(self, reason: str, *, is_final: bool = False, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.is_final = is_final
        self.pause_s = pause_s  # that the collector asks for


class Collector:
    """One address to which encoded spans are posted over a connection that is kept. One thread uses it."""

    def __init__(self, endpoint: str) -> None:
        """Raises ConfigError for an address that is none of HTTP."""
        parts = _parse(endpoint)
        make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = make(parts.hostname or "", parts.port, timeout=REQUEST_TIMEOUT_S)
        self._path = parts.path if parts.path.strip("/") else TRACES_PATH

    def post(self, body: bytes) -> int:
        """Returns the number of spans that were not taken. Raises NotDelivered."""
        headers = {"Content-Type": "application/x-protobuf", "User-Agent": "roseinfer"}
        try:
            self._connection.request("POST", self._path, body, headers)
            with self._connection.getresponse() as response:
                status, answer, asked = response.status, response.read(_MAX_ANSWER_BYTES), response.headers
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise NotDelivered(str(error) or type(error).__name__) from None
        if status == 200:
            return otlp.num_rejected(answer)
        self._connection.close()
        raise NotDelivered(f"status {status}", is_final=status not in RETRYABLE, pause_s=_pause_s(asked))

    def close(self) -> None:
        self._connection.close()


def _pause_s(headers: Message) -> float:
    """Returns the seconds that Retry-After asks for; 0 for a date."""
    asked = headers.get("Retry-After", "")
    return float(asked) if asked.isascii() and asked.isdigit() else 0.0


def _parse(endpoint: str) -> SplitResult:
    try:
        parts = urlsplit(endpoint)
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        # As the thread will do it, where an error would be seen too late.
        (parts.hostname or "").encode("idna"), parts.path.encode("ascii")
    except ValueError:
        is_usable = False
    if not is_usable or parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"{endpoint!r} is no address such as http://127.0.0.1:4318", param="tracing.endpoint")
    return parts


class SpanExport:
    """The queue and its thread. `put` belongs to the event loop."""

    def __init__(
        self,
        collector: Collector,
        encoder: Encoder,
        max_queued_spans: int,
        on_lost: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_lost` is called in the thread, with the id of each trace that had room and was not delivered."""
        self._collector = collector
        self._on_lost = on_lost
        self._encoder = encoder
        self._max_queued_spans = max_queued_spans
        self._queue: deque[Sequence[Span]] = deque()
        self._num_queued = 0
        self._num_dropped = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="roseinfer-spans", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Spans that found no room or could not be delivered, so far."""
        return self._num_dropped

    def put(self, spans: Sequence[Span]) -> bool:
        """Queues the spans of one trace, all or none; returns whether there was room."""
        with self._changed:
            if self._num_queued + len(spans) > self._max_queued_spans or self._closing.is_set():
                self._num_dropped += len(spans)
                return False
            self._queue.append(spans)
            self._num_queued += len(spans)
            self._changed.notify()
        return True

    def close(self, timeout_s: float) -> None:
        """Delivers what is queued, if that takes no longer than the timeout. Idempotent."""
        with self._changed:
            self._closing.set()
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._num_queued or self._num_dropped:
            logger.info("spans were lost", extra={"undelivered": self._num_queued, "dropped": self._num_dropped})

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while batch := self._next_batch():
            num_spans = sum(map(len, batch))
            num_lost = self._deliver(self._encode(batch), num_spans)
            with self._changed:
                self._num_queued -= num_spans
                self._num_dropped += num_lost
            if num_lost == num_spans:
                for trace in batch:
                    self._on_lost(trace[0].trace_id)
        self._collector.close()

    def _next_batch(self) -> list[Sequence[Span]]:
        """Returns traces for one request, or none when it is time to end; they count as queued until sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing.is_set())
            self._changed.wait_for(self._is_worth_sending, GATHER_S)
            batch, num_spans = [], 0
            while self._queue and num_spans < MAX_BATCH_SPANS:
                batch.append(self._queue.popleft())
                num_spans += len(batch[-1])
            return batch

    def _is_worth_sending(self) -> bool:
        return self._num_queued >= MAX_BATCH_SPANS or self._closing.is_set()

    def _encode(self, batch: Sequence[Sequence[Span]]) -> bytes:
        spans = [span for trace in batch for span in trace]
        pieces = []
        for first in range(0, len(spans), _SPANS_AT_ONCE):
            pieces.append(self._encoder.encode(spans[first : first + _SPANS_AT_ONCE]))
            time.sleep(0)  # offers the interpreter to the event loop
        return b"".join(pieces)

    def _deliver(self, body: bytes, num_spans: int) -> int:
        """Posts, and again while that can help; returns how many spans are lost. Closing ends the pauses."""
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                num_lost = self._collector.post(body)
            except NotDelivered as error:
                self._note_failure(str(error))
                if error.is_final or attempt == MAX_ATTEMPTS or self._closing.is_set():
                    break
                jittered_s = random.uniform(0.5, 1.0) * pause_s  # noqa: S311 - so that servers do not come all at once
                self._closing.wait(min(MAX_PAUSE_S, max(jittered_s, error.pause_s)))
                pause_s *= 2
            else:
                self._note_success()
                return num_lost
        return num_spans

    def _note_failure(self, reason: str) -> None:
        if not self._is_failing:
            self._is_failing = True
            logger.warning(
                "the collector does not take spans; they are dropped until it does", extra={"reason": reason}
            )

    def _note_success(self) -> None:
        if self._is_failing:
            self._is_failing = False
            logger.info("the collector takes spans again")
