"""A whole server over an engine without a model, with the observers that name causes, and clients over real sockets."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from roseinfer.config.options import Config, ServerConfig
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.link.client import AsyncEngine
from roseinfer.engine.link.transport import ThreadTransport, Transport
from roseinfer.observe.gaps.attribution import Attribution
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.hub import Hub
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.observe.recorder.flight import Flight
from roseinfer.observe.telemetry.facts import Page
from roseinfer.records import Advanced, Delivery, Observer, RequestTimeline, StepRecord
from roseinfer.runtime.cpu_waits import LoopWaits
from roseinfer.runtime.gc_pauses import GcPauses
from roseinfer.server.app import Instruments, build_app, build_runner
from roseinfer.server.ops.pages import Pages
from roseinfer.server.service import Service
from tests.unit.engine.harness import roomy_estimate
from tests.unit.server.harness import ledgers_of, text_model


class Tape(Observer):
    """Everything that was told."""

    def __init__(self) -> None:
        self.timelines: list[RequestTimeline] = []
        self.finished: list[RequestTimeline] = []
        self.steps: list[StepRecord] = []
        self.writes: list[tuple[RequestTimeline, Delivery]] = []

    def on_start(self, timeline: RequestTimeline) -> None:
        self.timelines.append(timeline)

    def on_step(self, record: StepRecord, advanced: Advanced) -> None:
        self.steps.append(record)

    def on_write(self, timeline: RequestTimeline, delivery: Delivery) -> None:
        self.writes.append((timeline, delivery))

    def on_finish(self, timeline: RequestTimeline) -> None:
        self.finished.append(timeline)


@dataclass
class LiveServer:
    """A running API port with its observers, and clients for it."""

    client: AsyncEngine
    service: Service
    metrics: Metrics
    attribution: Attribution
    flight: Flight
    tape: Tape
    url: str
    session: aiohttp.ClientSession
    slow: list[tuple[Gap, RequestTimeline]] = field(default_factory=list)
    _readers: list["asyncio.Task[None]"] = field(default_factory=list)

    async def complete(self, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, Any, Any]:
        """Status, headers and the decoded body of an answer that is not streamed."""
        body = {"prompt": [1, 2, 3], "temperature": 0, "ignore_eos": True} | body
        async with self.session.post(self.url + "/v1/completions", json=body, headers=headers) as response:
            return response.status, response.headers, json.loads(await response.read())

    def start(self, num_requests: int, **body: Any) -> None:
        """Requests that are read to their end, or until the server stops."""
        for _ in range(num_requests):
            self._readers.append(asyncio.create_task(self._read({"stream": True} | body)))

    async def _read(self, body: dict[str, Any]) -> None:
        body = {"prompt": [1, 2, 3], "temperature": 0, "ignore_eos": True, "max_tokens": 1000} | body
        async with self.session.post(self.url + "/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for _ in response.content.iter_any():
                pass

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return as soon as something is true. A reader that failed raises here."""
        while not holds():
            for reader in self._readers:
                if reader.done():
                    reader.result()
            await asyncio.sleep(0.002)

    async def generated(self, num_tokens: int) -> None:
        """Return once every request that is running has `num_tokens` more."""
        goals = [(t, len(t.token_ns) + num_tokens) for t in self.tape.timelines if t not in self.tape.finished]
        await self.until(lambda: all(len(t.token_ns) >= goal or t.finish_reason for t, goal in goals))

    async def stop_readers(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._readers.clear()
        await self.until(lambda: len(self.tape.finished) == len(self.tape.timelines))


@asynccontextmanager
async def live(
    build: Callable[[], Engine] | None = None,
    *,
    transport: Transport | None = None,
    send_buffer_bytes: int = 0,
    **server: Any,
) -> AsyncIterator[LiveServer]:
    """The API port over an engine in a thread, or over a transport, on a free port of the loopback."""
    config = Config(server=ServerConfig(served_model_name="fake", **server))
    if transport is None:
        assert build is not None
        transport = ThreadTransport(config, lambda _config, _on_progress: build())
    attribution, tape, pauses = Attribution(), Tape(), GcPauses()
    metrics = Metrics("fake", "0")
    flight = Flight(config, "0")
    hub = Hub([attribution, metrics, flight, tape])
    metrics.watch(attribution, lambda: hub.spent_ns)
    flight.listen(pauses, LoopWaits(), metrics, attribution.interruptions)
    client = AsyncEngine(transport, hub, 30.0, roomy_estimate())
    await client.start(lambda _: None)
    flight.engine_info = client.info
    attribution.set_graphs(has_graphs=bool(client.info.decode_graph_sizes))
    service = Service(config, client, hub, None, ledgers_of(attribution))
    service.open(text_model())
    instruments = Instruments(pages=_pages(metrics), ledgers=ledgers_of(attribution))
    runner = build_runner(build_app(service, instruments), 0.5)
    await runner.setup()
    try:
        listening = socket.create_server(("127.0.0.1", 0))
        if send_buffer_bytes:  # connections inherit it
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        await web.SockSite(runner, listening).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        with pauses:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                server_ = LiveServer(client, service, metrics, attribution, flight, tape, url, session)
                attribution.on_slow_gap.append(lambda gap, timeline: server_.slow.append((gap, timeline)))
                yield server_
                await server_.stop_readers()
    finally:
        await runner.cleanup()
        service.close()
        await client.close()


def _pages(metrics: Metrics) -> Pages:
    async def pages(accept: str, *, is_load: bool, takes_gzip: bool) -> Page:
        content, content_type = await asyncio.to_thread(metrics.render, accept)
        return Page(content, content_type, is_compressed=False)

    return pages


async def closed(reader: asyncio.StreamReader) -> bytes:
    """What came until the server closed; the test's time limit is the bound."""
    try:
        return await reader.read()
    except OSError:
        return b""
