"""Sends requests over HTTP when they are due, and stamps what comes back: the one client of all load benchmarks.

`LoadClient.run` is an open loop: a request goes out at its time whether or not earlier ones have been answered. A
thread waits for the times, since an event loop's timers are only good to a millisecond. Closed loops call `send` and
`exchange` themselves. Answers are kept as bytes with a stamp for each read, and parsed when their request is over.
"""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import msgspec

from roseinfer.bench.definitions import Observed
from roseinfer.bench.load.connection import Connection, Reader, open_connection
from roseinfer.bench.load.endpoint import Endpoint, authorization
from roseinfer.bench.load.event_stream import DATA, read_answer
from roseinfer.runtime.interrupts import run_until_signal

HEAD_START_NS = 50_000_000  # before the first request is due


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it will be sent."""

    request_id: str
    path: str
    body: bytes
    offset_ns: int = 0
    stream_interval: int | None = None  # tokens between two chunks, where the body asks for that
    abort_after_tokens: int | None = None
    abort_after_ns: int | None = None
    asks_ledger: bool = True


class Answer(NamedTuple):
    """A whole answer; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Pacer:
    """Calls `launch(index, due_ns)` on the loop for one request after the other, each when it is due."""

    def __init__(
        self, clock: Callable[[], int] = time.monotonic_ns, sleep: Callable[[float], object] | None = None
    ) -> None:
        self.clock = clock
        self._stopped = threading.Event()
        self._sleep = sleep or self._stopped.wait

    def start(self, due_ns: Sequence[int], launch: Callable[[int, int], None]) -> None:
        loop = asyncio.get_running_loop()

        def pace() -> None:
            for index, due in enumerate(due_ns):
                if (remaining := due - self.clock()) > 0:
                    self._sleep(remaining / 1e9)
                if self._stopped.is_set():
                    return
                with suppress(RuntimeError):  # the loop has been closed
                    loop.call_soon_threadsafe(launch, index, due)

        threading.Thread(target=pace, name="pacer", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()


class LoadClient:
    """A client of one endpoint. `on_done` is called with the number of requests that are over."""

    def __init__(
        self,
        endpoint: Endpoint,
        pacer: Pacer | None = None,
        on_done: Callable[[int], None] = lambda _: None,
        timeout_s: float | None = None,
    ) -> None:
        """With `timeout_s` a request whose answer takes longer has failed."""
        self._endpoint = endpoint
        self._pacer = pacer or Pacer()
        self._clock = self._pacer.clock
        self._on_done = on_done
        self._timeout_s = timeout_s
        self._num_done = 0
        self._unix_offset_ns = time.time_ns() - time.monotonic_ns()
        self._path = urlsplit(endpoint.url).path
        self._idle: list[Connection] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # in which their sockets close

    def run(self, requests: Sequence[PreparedRequest]) -> list[Observed]:
        """Send all and wait for the last answer. Garbage is collected before and after, not in between."""
        gc.collect()
        gc.disable()
        try:
            return run_until_signal(self._run(requests))
        finally:
            gc.enable()

    async def _run(self, requests: Sequence[PreparedRequest]) -> list[Observed]:
        tasks: list[asyncio.Task[Observed]] = []
        all_launched = asyncio.Event()

        def launch(index: int, due_ns: int) -> None:
            tasks.append(asyncio.create_task(self.send(requests[index], due_ns)))
            if len(tasks) == len(requests):
                all_launched.set()

        async with self:
            start_ns = self._clock() + HEAD_START_NS
            self._pacer.start([start_ns + request.offset_ns for request in requests], launch)
            try:
                await all_launched.wait()
                return list(await asyncio.gather(*tasks))
            finally:
                self._pacer.stop()

    async def send(
        self,
        request: PreparedRequest,
        due_ns: int | None = None,
        on_read: Callable[[int, bytes], None] = lambda _, __: None,
    ) -> Observed:
        """Send a request that is due at that moment, or now, and read the event stream that answers it.

        `on_read` is called with the stamp and the bytes of each read, for callers that do not wait for the end.
        """
        due_ns = self._clock() if due_ns is None else due_ns
        seen = Observed(request_id=request.request_id, intended_ns=due_ns)
        reads: list[tuple[int, bytes]] = []
        num_chunks = 0

        def keep(now_ns: int, data: bytes) -> bool:
            nonlocal num_chunks
            reads.append((now_ns, data))
            on_read(now_ns, data)
            if request.abort_after_tokens is None:
                return True
            num_chunks += data.count(DATA)
            seen.was_aborted = num_chunks >= request.abort_after_tokens
            return not seen.was_aborted

        limit_s = self._timeout_s if request.abort_after_ns is None else request.abort_after_ns / 1e9
        try:
            async with asyncio.timeout(limit_s):
                await self._post(request, seen, keep)
        except TimeoutError as error:  # asyncio's, or of a server that has fallen silent
            seen.was_aborted = request.abort_after_ns is not None
            seen.error = "" if seen.was_aborted else f"no answer: {str(error) or f'it took more than {limit_s:g} s'}"
        except OSError as error:
            seen.error = f"{type(error).__name__}: {error}"
        seen.end_ns = self._clock()
        read_answer(seen, reads, request.stream_interval)
        self._num_done += 1
        self._on_done(self._num_done)
        return seen

    async def _post(self, request: PreparedRequest, seen: Observed, keep: Reader) -> None:
        intended_s = (seen.intended_ns + self._unix_offset_ns) / 1e9
        headers = self._endpoint.headers(request.request_id, intended_s, asks_ledger=request.asks_ledger)
        async with self._connection() as connection:
            try:
                await connection.ask("POST", self._path + request.path, headers, request.body, keep)
            finally:
                seen.sent_ns, seen.status = connection.sent_ns, connection.status
            retry_after = connection.headers.get("retry-after", "")
            seen.retry_after_s = int(retry_after) if retry_after.isdecimal() else None

    async def exchange(
        self, path: str, body: bytes | dict[str, Any] = b"", headers: Mapping[str, str] | None = None, method: str = ""
    ) -> Answer:
        """One request of any kind and its whole answer; a GET without a body. Raises OSError.

        A dict is sent as JSON.
        """
        sent = authorization(self._endpoint.api_key) | dict(headers or {})
        if isinstance(body, dict):
            body, sent = msgspec.json.encode(body), {"Content-Type": "application/json", **sent}
        parts: list[bytes] = []

        def keep(_: int, data: bytes) -> bool:
            parts.append(data)
            return True

        async with self._connection() as connection:
            await connection.ask(method or ("POST" if body else "GET"), self._path + path, sent, body, keep)
            return Answer(connection.status, connection.headers, b"".join(parts))

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """One that is idle, or a new one; kept for the next request if it is still open."""
        while self._idle:
            if (connection := self._idle.pop()).is_open:  # the server closes what has been idle for long
                break
        else:
            connection = await open_connection(self._endpoint.url, self._clock)
        yield connection
        if connection.is_open:
            self._idle.append(connection)
