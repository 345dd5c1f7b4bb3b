"""The real telemetry process behind a front end that serves nothing: it dies, hangs, refuses, and is asked too late."""

import asyncio
import errno
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from roseinfer.config.options import Config, ModelConfig, ObserveConfig, ServerConfig
from roseinfer.errors import ConfigError, NotReady, Overloaded
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.metrics.scrape import Page
from roseinfer.observe.telemetry import link as link_module
from roseinfer.observe.telemetry import process as process_module
from roseinfer.observe.telemetry.forwarder import Forwarder
from roseinfer.observe.telemetry.process import TelemetryProcess
from roseinfer.records import LifecycleState, QueueReport
from roseinfer.server.ops.front_end import Reply
from tests.integration.test_http_scraping import answer
from tests.unit.observe.facts import MS
from tests.unit.observe.telemetry.test_forwarding import Serving, run_some


class Front:
    """A front end with traffic but without clients."""

    def __init__(self, observe: ObserveConfig) -> None:
        server = ServerConfig(served_model_name="tiny", ops_host="127.0.0.1")
        self.forwarder = Forwarder()
        config = Config(model=ModelConfig(path="m"), server=server, observe=observe)
        self.process = TelemetryProcess(config, self.forwarder, QueueReport)
        self.traffic = Serving(self.forwarder.hub)
        self.port = socket.create_server(("127.0.0.1", 0))
        self.ops = f"http://127.0.0.1:{self.port.getsockname()[1]}"
        self.is_taken_over = False
        self.forwarder.hub.on_lifecycle(LifecycleState.STARTING)

    async def take_over(self) -> None:
        self.is_taken_over = True

    async def page_now(self) -> Page:
        page = await self.process.page("", is_load=False, takes_gzip=False)
        return Page.parse(page.content.decode())

    async def page(self) -> Page:
        """The page as soon as there is one: on a busy machine the process is the last to run."""
        async with asyncio.timeout(60):
            while True:
                try:
                    return await self.page_now()
                except NotReady:
                    await asyncio.sleep(0.02)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def is_exact(self, page: Page) -> bool:
        """Whether the page has every request and every token, those included that it was not told of."""
        num_tokens = sum(len(timeline.token_ns) for timeline in self.traffic.received)
        return (
            page.value("roseinfer_generation_tokens_total") == num_tokens
            and page.value("roseinfer_requests_received_total") == len(self.traffic.received)
            and page.value("roseinfer_http_inflight_streams") == len(self.traffic.running + self.traffic.waiting)
            and sum(page.samples["roseinfer_requests_total"].values()) == len(self.traffic.ended)
        )


@asynccontextmanager
async def front(
    *more_ports: socket.socket, replies: Mapping[str, Reply] | None = None, **observe: object
) -> AsyncIterator[Front]:
    started = Front(ObserveConfig(log_level="error", **observe))  # type: ignore[arg-type]
    await started.process.start(replies or {}, [started.port, *more_ports], started.take_over)
    try:
        yield started
    finally:
        await started.process.close()


async def test_a_process_that_is_killed_is_started_once_more_with_true_totals(caplog: pytest.LogCaptureFixture) -> None:
    async with front() as server:
        run_some(server.traffic, 1)
        assert server.is_exact(await server.page())
        first = server.process.pid
        server.signal(signal.SIGKILL)
        while server.process.num_restarts == 0:
            run_some(server.traffic, 2, num_acts=5)
            await asyncio.sleep(0)
        run_some(server.traffic, 3)
        page = await server.page()
        assert server.process.pid not in {None, first}
        assert os.sched_getscheduler(server.process.pid or 0) == os.SCHED_BATCH
        assert server.is_exact(page)
        assert page.value("roseinfer_telemetry_restarts_total") == 1
        server.signal(signal.SIGKILL)
        while server.process._link is not None:  # noqa: ASYNC110 - nobody is told of it
            await asyncio.sleep(0.001)
        run_some(server.traffic, 4)
        with pytest.raises(NotReady, match="not running"):
            await server.page_now()
        await asyncio.sleep(0)
        assert server.is_taken_over
    assert "died again" in caplog.text


async def test_one_that_cannot_be_started_again_leaves_the_port_to_the_front_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async with front() as server:
        await server.page()
        monkeypatch.setattr(server.process._forks, "fork", refuse)
        server.signal(signal.SIGKILL)
        async with asyncio.timeout(60):
            while not server.is_taken_over:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.001)
    assert "cannot be started" in caplog.text


async def test_scrapers_of_the_operations_port_get_the_newest_facts_without_aiohttp() -> None:
    head = "GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept-Encoding: gzip\r\n{more}\r\n"
    async with front() as server:
        await server.page()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port.getsockname()[1])
        for seed in range(20):
            run_some(server.traffic, seed, num_acts=5)
            writer.write(head.format(path="/metrics", more="").encode())
            assert server.is_exact(Page.parse((await answer(reader))[2].decode()))
        found = []
        run_some(server.traffic, 20)  # the quick page is of these too
        for more in ("", "X-Agent: another\r\n"):  # the second is aiohttp's
            writer.write(head.format(path="/metrics/load", more=more).encode())
            found.append(await answer(reader))
        writer.close()
    (status, quick, body), (slow_status, slow, slow_body) = found
    assert (status, body) == (slow_status, slow_body)
    assert list(quick) != list(slow), "aiohttp has another order"
    assert quick.keys() == slow.keys()
    changing = ("date", "x-request-id")
    assert all(quick[name] == slow[name] for name in quick if name not in changing)


async def test_scrapers_of_the_api_port_are_the_process_s_until_they_ask_for_something_else() -> None:
    head = b"GET /metrics%s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    ours, theirs = socket.socketpair()
    back: asyncio.Future[tuple[socket.socket, bytes]] = asyncio.get_running_loop().create_future()
    async with front() as server:
        server.process.passage.open(lambda *returned: back.set_result(returned))
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=theirs)
        assert server.process.passage.give(transport, head % b"")  # before it is ready
        reader, writer = await asyncio.open_connection(sock=ours)
        assert server.is_exact(Page.parse((await answer(reader))[2].decode()))
        for seed, path in enumerate((b"/load", b"", b"/load")):
            run_some(server.traffic, seed)
            writer.write(head % path)
            page = Page.parse((await answer(reader))[2].decode())
            num_in_flight = len(server.traffic.running + server.traffic.waiting)
            assert page.value("roseinfer_http_inflight_streams") == num_in_flight
            assert path or server.is_exact(page)
        writer.write(head % b"?")
        returned, data = await back
        assert data == head % b"?"
        returned.sendall(b"the front end's answer")
        returned.close()
        assert await reader.read() == b"the front end's answer"
        writer.close()


async def test_one_that_hangs_is_waited_for_by_nobody_and_takes_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "MAX_WAITING_BYTES", 100_000)
    async with front() as server:
        await server.page()
        server.signal(signal.SIGSTOP)
        server.traffic.arrive(3)
        server.traffic.step(MS, 1)
        server.traffic.step(MS, 0)
        with monkeypatch.context() as patch:
            patch.setattr(process_module, "PAGE_TIMEOUT_S", 0.05)
            with pytest.raises(NotReady, match="does not answer"):
                await server.page_now()
        (request,) = server.traffic.running
        (ledger,) = await server.process.ledgers([request], server.traffic.now_ns)
        parts = ledger["parts_ns"]
        assert isinstance(parts, dict)
        assert parts["decode.unknown"] == request.token_ns[1] - request.token_ns[0]
        assert parts["delivery"] >= process_module.LEDGER_TIMEOUT_S * 1e9, "so long the client waited"
        assert sum(parts.values()) == ledger["total_ns"]
        for seed in range(1000):
            run_some(server.traffic, seed)
            server.forwarder.catch_up()
            if server.forwarder.num_dropped > 1000:
                break
        link = server.process._link
        assert link is not None
        assert link._transport is not None
        assert link._transport.get_write_buffer_size() < 400_000, "what may wait, and the batch that was too much"
        with pytest.raises(NotReady):
            await server.page_now()
        server.signal(signal.SIGCONT)
        assert server.is_exact(await server.page())
        run_some(server.traffic, 7)
        page = await server.page()
        assert server.is_exact(page)
        assert page.value("roseinfer_telemetry_dropped_total", signal="fact") == server.forwarder.num_dropped
        assert page.value("roseinfer_telemetry_restarts_total") == 0


async def test_one_that_hangs_for_long_counts_as_dead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_module, "HANG_S", 0.2)
    async with front() as server:
        monkeypatch.setattr(process_module, "START_S", 60.0)
        await server.page()
        monkeypatch.setattr(process_module, "START_S", 0.2)
        server.signal(signal.SIGSTOP)
        run_some(server.traffic, 1)
        server.forwarder.catch_up()
        monkeypatch.setattr(process_module, "LOOK_INTERVAL_S", 0.05)
        assert server.process._watching is not None
        server.process._watching.cancel()
        watching = asyncio.create_task(server.process._watch())
        while server.process.num_restarts == 0:  # noqa: ASYNC110 - nobody is told of it
            await asyncio.sleep(0.01)
        watching.cancel()
        page = await server.page()
        assert server.is_exact(page)
        num_dropped = page.value("roseinfer_telemetry_dropped_total", signal="fact")
        assert num_dropped == server.forwarder.num_dropped > 0, "what it was sent and did not take"
    assert "has not answered for 0.2 s" in caplog.text


async def test_one_that_dies_while_it_is_asked_is_not_taken_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it has waited for a core in its life, which the next one has not."""
    server = Front(ObserveConfig())
    process = server.process
    kills, has_died = list[int | None](), asyncio.Event()

    class Dying:
        num_asked = 0

        async def ask(self, *_: object, **__: object) -> bytes:
            self.num_asked += 1
            if self.num_asked == 1:
                return b""
            process.pid, process._link = 2, None
            has_died.set()
            raise NotReady("It has ended.")

    monkeypatch.setattr(process_module, "waited_s", lambda pid: 100.0 if pid == 1 else 0.0)
    monkeypatch.setattr(process_module, "LOOK_INTERVAL_S", 0.0)
    monkeypatch.setattr(process, "_kill", lambda: kills.append(process.pid))
    process.pid, process._link = 1, Dying()  # type: ignore[assignment]
    watching = asyncio.create_task(process._watch())
    await has_died.wait()
    watching.cancel()
    await process.close()
    server.port.close()
    assert kills == []


async def test_the_operations_port_asks_the_front_end(tmp_path: Path) -> None:
    refused: list[bytes] = []

    async def probe(path: bytes) -> bytes:
        from msgspec import msgpack

        return msgpack.encode({"status": 503 if path == b"/readyz" else 200, "body": path})

    async def profile(_: bytes) -> bytes:
        raise Overloaded("Not now.")

    async def refusal(code: bytes) -> bytes:
        refused.append(code)
        return b""

    replies = {"probe": probe, "begin_profile": profile, "refusal": refusal}
    async with front(replies=replies, capture_dir=str(tmp_path)) as server, aiohttp.ClientSession() as session:
        for path, status in (("/livez", 200), ("/readyz", 503)):
            async with session.get(server.ops + path) as response:
                assert (response.status, await response.text()) == (status, path)
        run_some(server.traffic, 1)
        async with session.get(f"{server.ops}/metrics") as response:
            assert server.is_exact(Page.parse(await response.text()))
        server.traffic.arrive(5)
        async with session.get(f"{server.ops}/debug/requests") as response:
            found = (await response.json())["requests"]
            assert {each["id"] for each in found} == {
                each.request_id for each in server.traffic.running + server.traffic.waiting
            }
        async with session.post(f"{server.ops}/debug/profile") as response:
            assert (response.status, (await response.json())["error"]["message"]) == (429, "Not now.")
        async with session.get(f"{server.ops}/nowhere") as response:
            assert response.status == 404
        async with session.get(f"{server.ops}/metrics"):  # asked after what it was told
            pass
        assert refused == [b"overloaded", b"unknown_route"]


async def test_what_it_cannot_do_is_known_before_the_server_is_ready() -> None:
    async with front(capture_rules=["nonsense"], capture_dir="x") as server:
        with pytest.raises(ConfigError, match="rule 1") as refusal:
            await server.process.ready()
        assert refusal.value.param == "observe.capture_rules"


async def test_one_whose_server_never_started_is_ended_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """The sentence of the refusal stays the last one, and comes at once."""
    async with front() as server:
        process = server.process._forks._process
        assert process is not None
    assert process.wait(0) == -signal.SIGKILL
    assert caplog.text == ""


async def test_causes_of_a_ledger_come_from_the_process() -> None:
    async with front() as server:
        await server.page()  # it has started
        server.traffic.arrive(3)
        for _ in range(6):
            server.traffic.step(5 * MS, 1)
        (request,) = server.traffic.running
        (ledger,) = await server.process.ledgers([request], server.traffic.now_ns)
        parts = ledger["parts_ns"]
        assert isinstance(parts, dict)
        assert sum(parts.values()) == ledger["total_ns"]
        assert ledger["total_ns"] >= server.traffic.now_ns - request.recv_ns
        assert set(parts) & {f"decode.{cause}" for cause in Cause} - {"decode.unknown"}


async def test_no_page_is_made_before_it_is_known_what_was_counted() -> None:
    """Counters that are 0 on one page count as all of them again, and another time of the start as another server."""
    head = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]  # each takes it a turn of its loop to open
    async with front(*ports) as server:
        run_some(server.traffic, 1)
        before = await server.page()
        server.signal(signal.SIGKILL)
        ours, theirs = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=theirs)
        assert server.process.passage.give(transport, head)
        reader, writer = await asyncio.open_connection(sock=ours)
        page = Page.parse((await answer(reader))[2].decode())
        writer.close()
        assert server.is_exact(page)
        assert page.value("roseinfer_start_time_seconds") == before.value("roseinfer_start_time_seconds")
