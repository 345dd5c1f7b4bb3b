"""Sends requests over HTTP when they are due, and stamps what comes back: the one client of all load benchmarks.

`LoadClient.run` is an open loop: a request goes out at its time whether or not earlier ones have been answered. A
thread waits for the times, since an event loop's timers are only good to a millisecond. Closed loops call `send` and
`exchange` themselves. Answers are kept as bytes with a stamp for each read, and parsed when their request is over.
"""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import aiohttp
import msgspec

from roseinfer.bench.definitions import Observed
from roseinfer.bench.load.endpoint import Endpoint, authorization, base_of, read_models
from roseinfer.bench.load.event_stream import DATA, read_events, read_refusal
from roseinfer.errors import ConfigError

ANSWER_TIMEOUT_S = 600.0  # between two reads
CONNECT_TIMEOUT_S = 10.0
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
    """A whole answer."""

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
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        async def note_sent(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
            if context.trace_request_ctx is not None:
                context.trace_request_ctx.sent_ns = self._clock()

        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(note_sent)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=ANSWER_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, trace_configs=[trace])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def run(self, requests: Sequence[PreparedRequest]) -> list[Observed]:
        """Send all and wait for the last answer. Garbage is collected before and after, not in between."""
        gc.collect()
        gc.disable()
        try:
            return asyncio.run(self._run(requests))
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

    async def send(self, request: PreparedRequest, due_ns: int | None = None) -> Observed:
        """Send a request that was due at that moment, or is now, and read the event stream that answers it."""
        due_ns = self._clock() if due_ns is None else due_ns
        seen = Observed(request_id=request.request_id, intended_ns=due_ns)
        reads: list[tuple[int, bytes]] = []
        limit_s = self._timeout_s if request.abort_after_ns is None else request.abort_after_ns / 1e9
        try:
            async with asyncio.timeout(limit_s):
                await self._stream(request, seen, reads)
        except TimeoutError as error:  # asyncio's, or aiohttp's of a server that has fallen silent
            seen.was_aborted = request.abort_after_ns is not None
            seen.error = "" if seen.was_aborted else f"no answer: {error}"
        except aiohttp.ClientError as error:
            seen.error = f"{type(error).__name__}: {error}"
        seen.end_ns = self._clock()
        if not seen.error:
            read_events(seen, reads, request.stream_interval)
        self._num_done += 1
        self._on_done(self._num_done)
        return seen

    async def _stream(self, request: PreparedRequest, seen: Observed, reads: list[tuple[int, bytes]]) -> None:
        intended_s = (seen.intended_ns + self._unix_offset_ns) / 1e9
        headers = self._endpoint.headers(request.request_id, intended_s, asks_ledger=request.asks_ledger)
        url = self._endpoint.url + request.path
        num_chunks = 0
        async with self._session.post(url, data=request.body, headers=headers, trace_request_ctx=seen) as response:
            seen.status = response.status
            if response.status != 200:
                retry_after = response.headers.get("Retry-After", "")
                seen.retry_after_s = int(retry_after) if retry_after.isdecimal() else None
                read_refusal(seen, response.status, await response.read())
                return
            async for data in response.content.iter_any():
                reads.append((self._clock(), data))
                if request.abort_after_tokens is not None:
                    num_chunks += data.count(DATA)
                    if num_chunks >= request.abort_after_tokens:
                        seen.was_aborted = True
                        response.close()
                        return

    async def exchange(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, method: str = ""
    ) -> Answer:
        """One request of any kind and its whole answer; a GET without a body. Raises aiohttp.ClientError.

        `body` is sent as it is when it is bytes or a file, and as JSON otherwise.
        """
        data = msgspec.json.encode(body) if isinstance(body, dict) else body
        sent = {"Content-Type": "application/json", **authorization(self._endpoint.api_key), **(headers or {})}
        url, method = self._endpoint.url + path, method or ("GET" if body is None else "POST")
        async with self._session.request(method, url, data=data, headers=sent) as response:
            return Answer(response.status, response.headers, await response.read())


async def get(url: str, api_key: str, param: str) -> bytes:
    """The body of a GET. Raises ConfigError when nothing answers or the answer is another status than 200."""
    timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=authorization(api_key)) as session,
            session.get(url) as response,
        ):
            body = await response.read()
            if response.status == 200:
                return body
            raise ConfigError(f"{url} answers {response.status}: {body.decode(errors='replace')[:200]}", param=param)
    except aiohttp.ClientConnectorError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"nothing answers at {url}: {reason}", param=param) from None
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ConfigError(f"nothing answers at {url}: {type(error).__name__} {error}", param=param) from None


def find_endpoint(url: str, api_key: str) -> Endpoint:
    """The server at `url`, with `/v1` at its end or without. Raises ConfigError when there is none."""
    url = base_of(url)
    body = asyncio.run(get(f"{url}/v1/models", api_key, "--url"))
    return read_models(url, api_key, body)
