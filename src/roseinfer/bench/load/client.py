"""Sends prepared bodies to a server when they are due and stamps what comes back. Knows no percentile and no plan.

Open loop: a request goes out at its time whether or not the ones before it have been answered. A thread does the
waiting, since an event loop's timers are only good to a millisecond; the loop does the rest. What arrives is stamped
and kept as bytes, and read when its request is over.
"""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace

import aiohttp
import msgspec

from roseinfer.bench.load.endpoint import Endpoint, authorization, base_of, read_models
from roseinfer.bench.load.event_stream import DATA, read_events, read_refusal
from roseinfer.bench.load.observed import Observed
from roseinfer.errors import ConfigError

ANSWER_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0
HEAD_START_NS = 50_000_000  # before the first request is due


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it will be sent."""

    request_id: str
    offset_ns: int
    path: str
    body: bytes
    stream_interval: int | None = None  # tokens between two chunks, where the body asks for that
    abort_after_tokens: int | None = None
    abort_after_ns: int | None = None


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
                with suppress(RuntimeError):  # the loop is gone: so is whoever wanted this
                    loop.call_soon_threadsafe(launch, index, due)

        threading.Thread(target=pace, name="pacer", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()


class LoadClient:
    """Everything that is sent to one endpoint. `on_done` hears how many requests are over."""

    def __init__(self, endpoint: Endpoint, pacer: Pacer, on_done: Callable[[int], None] = lambda _: None) -> None:
        self._endpoint = endpoint
        self._pacer = pacer
        self._clock = pacer.clock
        self._on_done = on_done
        self._num_done = 0

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
        monotonic_ns, unix_ns = time.monotonic_ns(), time.time_ns()
        async with self._session() as session:

            def launch(index: int, due_ns: int) -> None:
                request = requests[index]
                seen = Observed(request_id=request.request_id, intended_ns=due_ns)
                intended_s = (unix_ns + due_ns - monotonic_ns) / 1e9
                tasks.append(asyncio.create_task(self._send(session, request, seen, intended_s)))
                if len(tasks) == len(requests):
                    all_launched.set()

            start_ns = self._clock() + HEAD_START_NS
            self._pacer.start([start_ns + request.offset_ns for request in requests], launch)
            try:
                await all_launched.wait()
                return list(await asyncio.gather(*tasks))
            finally:
                self._pacer.stop()

    def _session(self) -> aiohttp.ClientSession:
        async def note_sent(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
            context.trace_request_ctx.sent_ns = self._clock()

        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(note_sent)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=ANSWER_TIMEOUT_S)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=timeout,
            trace_configs=[trace],
            headers=self._endpoint.headers,
        )

    async def _send(
        self, session: aiohttp.ClientSession, request: PreparedRequest, seen: Observed, intended_s: float
    ) -> Observed:
        reads: list[tuple[int, bytes]] = []
        limit_s = None if request.abort_after_ns is None else request.abort_after_ns / 1e9
        try:
            async with asyncio.timeout(limit_s):
                await self._exchange(session, request, seen, f"{intended_s:.6f}", reads)
        except TimeoutError as error:  # asyncio's, or aiohttp's of a server that has fallen silent
            seen.was_aborted = limit_s is not None
            seen.error = "" if seen.was_aborted else f"no answer: {error}"
        except aiohttp.ClientError as error:
            seen.error = f"{type(error).__name__}: {error}"
        seen.end_ns = self._clock()
        if not seen.error:
            read_events(seen, reads, request.stream_interval)
        self._num_done += 1
        self._on_done(self._num_done)
        return seen

    async def _exchange(
        self,
        session: aiohttp.ClientSession,
        request: PreparedRequest,
        seen: Observed,
        intended_s: str,
        reads: list[tuple[int, bytes]],
    ) -> None:
        headers = {"x-request-id": request.request_id, "x-roseinfer-intended-time": intended_s}
        url = self._endpoint.url + request.path
        num_chunks = 0
        async with session.post(url, data=request.body, headers=headers, trace_request_ctx=seen) as response:
            if response.status != 200:
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


async def get(url: str, api_key: str, param: str) -> bytes:
    """The body of a GET. Raises ConfigError, one sentence, when there is nobody or it is refused."""
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
        told = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"nothing answers at {url}: {told}", param=param) from None
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ConfigError(f"nothing answers at {url}: {type(error).__name__} {error}", param=param) from None


def find_endpoint(url: str, api_key: str) -> Endpoint:
    """What serves at `url`, with `/v1` at its end or without. Raises ConfigError when nothing does."""
    url = base_of(url)
    body = asyncio.run(get(f"{url}/v1/models", api_key, "--url"))
    return read_models(url, api_key, body)
