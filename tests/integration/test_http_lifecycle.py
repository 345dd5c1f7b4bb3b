"""`lifecycle.run` from bind to exit code, in this process: ports before the engine, signals, drain, death."""

import asyncio
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import pytest

from roseinfer.bench.load.launcher import free_port
from roseinfer.config.options import Config, ServerConfig
from roseinfer.errors import ConfigError, EngineDead, EngineFailed
from roseinfer.messages import StartupProgress
from roseinfer.records import FinishReason, LifecycleState
from roseinfer.server import lifecycle
from roseinfer.text.text_model import TextModel
from tests.unit.server.harness import (
    INSTRUMENTS,
    Listener,
    ScriptedEngine,
    engine_info,
    says,
    write_checkpoint,
)

PATIENCE_S = 15.0  # shorter than a drain's default, which would be waited for by mistake


@dataclass
class Running:
    """`run` as a task, and a client for its ports."""

    task: "asyncio.Task[int]"
    engine: ScriptedEngine
    listener: Listener
    session: aiohttp.ClientSession
    port: int
    ready_urls: list[str]

    async def status(self, path: str, **options: Any) -> int:
        method = "POST" if options else "GET"
        async with self.session.request(method, f"http://127.0.0.1:{self.port}{path}", **options) as response:
            await response.read()
            return response.status

    async def until(self, path: str, status: int) -> None:
        """Ask until the answer has the status: the test's time limit is the bound."""
        while True:
            try:
                if await self.status(path) == status:
                    return
            except aiohttp.ClientConnectorError:
                pass  # the port is not open yet
            await asyncio.sleep(0.01)

    async def open(self) -> aiohttp.ClientResponse:
        body = {"prompt": "Hi", "stream": True}
        return await self.session.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body)

    async def open_and_say(self, text: str) -> aiohttp.ClientResponse:
        """A stream that has its first text."""
        opening = asyncio.create_task(self.open())
        await self.engine.received()
        self.engine.say(text)
        return await opening


@asynccontextmanager
async def running(tmp_path: Path, *, is_warm: bool = True, **server: Any) -> AsyncIterator[Running]:
    engine = ScriptedEngine(info=engine_info(checkpoint_dir=str(write_checkpoint(tmp_path))))
    if is_warm:
        engine.started.set()
    port, listener, urls = free_port(), Listener(), list[str]()
    options: dict[str, Any] = {"ops_port": 0} | server
    config = Config(server=ServerConfig(port=port, served_model_name="scripted", **options))
    task = asyncio.create_task(lifecycle.run(config, engine, listener, INSTRUMENTS, urls.append))
    async with aiohttp.ClientSession() as session:
        server_under_test = Running(task, engine, listener, session, port, urls)
        if is_warm:
            await server_under_test.until("/readyz", 200)
        try:
            yield server_under_test
        finally:
            task.cancel()
            await asyncio.wait({task})


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


async def read_events(response: aiohttp.ClientResponse) -> list[Any]:
    frames = (await response.read()).decode().removesuffix("\n\n").split("\n\n")
    payloads = [frame.removeprefix("data: ") for frame in frames]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


async def test_the_ports_answer_before_the_engine_does(tmp_path: Path) -> None:
    ops_port = free_port()
    async with running(tmp_path, is_warm=False, ops_port=ops_port) as server:
        server.engine.progress.append(StartupProgress(LifecycleState.LOADING, "weights"))
        await server.until("/livez", 200)
        for path in ("/readyz", "/startupz", "/v1/models"):
            assert await server.status(path) == 503
        assert await server.status("/v1/completions", json={"prompt": "a"}) == 503
        async with server.session.get(f"http://127.0.0.1:{ops_port}/metrics") as response:
            assert response.status == 200
        assert server.ready_urls == []
        server.engine.started.set()
        await server.until("/readyz", 200)
        server.engine.reply = says("a")
        assert await server.status("/v1/completions", json={"prompt": "a"}) == 200
        assert server.ready_urls == [f"http://127.0.0.1:{server.port}"]
        assert server.listener.states == [LifecycleState.STARTING, LifecycleState.LOADING, LifecycleState.READY]


async def test_without_an_address_both_ports_listen_on_both_families(tmp_path: Path) -> None:
    """As in a pod, whose kubelet asks at an address of IPv6 in some clusters, and of IPv4 in others."""
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    ops_port = free_port()
    async with running(tmp_path, host="", ops_host="", ops_port=ops_port) as server:
        for host in ("127.0.0.1", "[::1]"):
            for port in (server.port, ops_port):
                async with server.session.get(f"http://{host}:{port}/readyz") as response:
                    assert response.status == 200
        assert server.ready_urls == [f"http://localhost:{server.port}"]


async def test_text_is_loaded_while_the_engine_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_loaded, load = threading.Event(), TextModel.load

    def load_once(*arguments: Any, **options: Any) -> TextModel:
        assert not is_loaded.is_set()
        is_loaded.set()
        return load(*arguments, **options)

    monkeypatch.setattr(TextModel, "load", load_once)
    async with running(tmp_path, is_warm=False) as server:
        directory = server.engine.engine_info.checkpoint_dir
        stages = (("checkpoint", ""), ("weights", directory), ("kv_cache", ""), ("again", directory))
        server.engine.progress += [StartupProgress(LifecycleState.LOADING, stage, "", where) for stage, where in stages]
        await asyncio.to_thread(is_loaded.wait, PATIENCE_S)
        assert await server.status("/readyz") == 503
        server.engine.started.set()
        await server.until("/readyz", 200)


async def test_a_tokenizer_that_cannot_be_read_matters_once_there_is_an_engine(tmp_path: Path) -> None:
    async with running(tmp_path, is_warm=False) as server:
        directory = server.engine.engine_info.checkpoint_dir
        (Path(directory) / "tokenizer.json").write_text("{")
        server.engine.progress.append(StartupProgress(LifecycleState.LOADING, "weights", "", directory))
        server.engine.started.set()
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            await server.task


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_server_leaves_at_once(
    tmp_path: Path, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, lifecycle.__name__)
    async with running(tmp_path) as server:
        send(number)
        assert await asyncio.wait_for(server.task, PATIENCE_S) == 0
        assert server.engine.num_closes == 1
        assert server.listener.states[-1] is LifecycleState.DRAINING
    assert told(caplog) == [("INFO", "drained, all requests have ended"), ("INFO", "stopped with exit code 0")]


@pytest.mark.parametrize("is_ignored", [False, True])
async def test_the_end_of_the_terminal_drains_however_often_it_is_reported(tmp_path: Path, is_ignored: bool) -> None:
    """Shell and kernel both send SIGHUP; `nohup` has it ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        async with running(tmp_path) as server:
            async with await server.open_and_say("a") as response:
                send(signal.SIGHUP)
                await server.until("/readyz", 200 if is_ignored else 503)
                send(signal.SIGHUP)
                server.engine.say("b", FinishReason.LENGTH)
                *_, last = await read_events(response)
                assert last == "[DONE]"
            if is_ignored:
                send(signal.SIGTERM)
            assert await asyncio.wait_for(server.task, PATIENCE_S) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_drain_lets_streams_finish_and_refuses_new_requests(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        async with await server.open_and_say("a") as response:
            send(signal.SIGTERM)
            await server.until("/readyz", 503)
            assert await server.status("/livez") == 200
            url = f"http://127.0.0.1:{server.port}/v1/completions"
            async with server.session.post(url, json={"prompt": "b"}) as refused:
                assert refused.status == 503
                assert refused.headers["Connection"] == "close"
                assert "Retry-After" in refused.headers
            server.engine.say("b", FinishReason.LENGTH)
            events = await read_events(response)
        assert [event["choices"][0]["text"] for event in events[:-1]] == ["a", "b"]
        assert events[-1] == "[DONE]"
        assert await asyncio.wait_for(server.task, PATIENCE_S) == 0


async def assert_cut(server: Running, response: aiohttp.ClientResponse) -> None:
    *_, last = await read_events(response)
    assert last["error"]["code"] == "not_ready", "an error event, and no [DONE] after it"
    assert await asyncio.wait_for(server.task, PATIENCE_S) == 0
    [timeline] = server.engine.closed
    assert (timeline.finish_reason, timeline.error_code) == (FinishReason.ABORT, "not_ready")
    assert not timeline.client_disconnected
    assert server.engine.aborted == [timeline.request_id]


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Level and message of what the lifecycle logged."""
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == lifecycle.__name__]


async def test_after_the_drain_limit_streams_end_with_an_error_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, lifecycle.__name__)
    async with running(tmp_path, drain_timeout_s=0.2) as server, await server.open_and_say("a") as response:
        send(signal.SIGTERM)
        await assert_cut(server, response)
    assert told(caplog) == [
        ("WARNING", "drain timeout after 0.2 s: 1 request was cut"),
        ("INFO", "stopped with exit code 0"),
    ]


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_does_not_wait_for_the_limit(
    tmp_path: Path, second: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, drain_timeout_s=3600) as server, await server.open_and_say("a") as response:
        send(signal.SIGTERM)
        await server.until("/readyz", 503)
        send(second)
        await assert_cut(server, response)
    assert ("WARNING", "second signal: 1 request was cut") in told(caplog)


async def test_a_queued_request_gets_a_status_when_time_is_up(tmp_path: Path) -> None:
    async with running(tmp_path, drain_timeout_s=0.2) as server:
        opening = asyncio.create_task(server.open())
        await server.engine.received()
        send(signal.SIGTERM)
        async with await opening as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "not_ready"


async def test_a_client_that_does_not_read_cannot_hold_up_the_exit(tmp_path: Path) -> None:
    async with running(tmp_path, drain_timeout_s=0.1) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = b'{"prompt": "Hi", "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await server.engine.received()
        server.engine.flood()
        send(signal.SIGTERM)
        assert await asyncio.wait_for(server.task, PATIENCE_S) == 0
        writer.close()
        [timeline] = server.engine.closed
        assert (timeline.finish_reason, timeline.error_code) == (FinishReason.ABORT, "not_ready")
        assert not timeline.client_disconnected


async def test_a_signal_while_loading(tmp_path: Path) -> None:
    async with running(tmp_path, is_warm=False) as server:
        await server.until("/livez", 200)
        send(signal.SIGTERM)
        assert await asyncio.wait_for(server.task, PATIENCE_S) == 0
        assert server.engine.num_closes == 1


async def test_progress_after_a_signal_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on loading until it is told to end: its progress must not undo the drain."""
    heard: list[Callable[[StartupProgress], None]] = []

    async def start(_: ScriptedEngine, on_progress: Callable[[StartupProgress], None]) -> NoReturn:
        heard.append(on_progress)
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(ScriptedEngine, "start", start)
    async with running(tmp_path, is_warm=False) as server:
        await server.until("/livez", 200)
        send(signal.SIGTERM)
        assert await asyncio.wait_for(server.task, PATIENCE_S) == 0
        [on_progress] = heard
        on_progress(StartupProgress(LifecycleState.LOADING, "weights", "", "nowhere"))


async def test_when_the_engine_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "FAILED_LINGER_S", 1.5)
    async with running(tmp_path) as server:
        async with await server.open_and_say("a") as response:
            server.engine.die(EngineDead("killed"))
            *_, last = await read_events(response)
            assert last["error"]["code"] == "engine_dead"
        assert await server.status("/livez") == 503
        assert await server.status("/v1/completions", json={"prompt": "a"}) == 503
        assert await asyncio.wait_for(server.task, PATIENCE_S) == 70
        assert server.listener.states[-1] is LifecycleState.FAILED


async def test_when_the_engine_dies_in_the_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "FAILED_LINGER_S", 0.1)
    async with running(tmp_path) as server:
        opening = asyncio.create_task(server.open())
        await server.engine.received()
        send(signal.SIGTERM)
        await server.until("/readyz", 503)
        server.engine.die(EngineFailed("a step raised"))
        async with await opening as response:
            assert response.status == 500
        assert await asyncio.wait_for(server.task, PATIENCE_S) == 70


async def test_an_engine_that_cannot_start(tmp_path: Path) -> None:
    async with running(tmp_path, is_warm=False) as server:
        server.engine.start_error = EngineFailed("no such device")
        server.engine.started.set()
        assert await asyncio.wait_for(server.task, PATIENCE_S) == 70


async def start_error(config: ServerConfig, engine: ScriptedEngine) -> ConfigError:
    engine.started.set()
    with pytest.raises(ConfigError) as caught:
        await lifecycle.run(Config(server=config), engine, Listener(), INSTRUMENTS, lambda _: None)
    assert engine.num_closes == 1
    return caught.value


async def test_a_value_the_engine_cannot_use(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    engine.start_error = ConfigError("no such checkpoint", param="model.path")
    assert (await start_error(ServerConfig(port=0, ops_port=0), engine)).param == "model.path"


@pytest.mark.parametrize("name", ["port", "ops_port"])
async def test_a_taken_port_is_named(name: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port: int = taken.getsockname()[1]
        config = ServerConfig(port=port, ops_port=0) if name == "port" else ServerConfig(port=0, ops_port=port)
        error = await start_error(config, ScriptedEngine())
    assert error.param == f"server.{name}"
    assert error.message == f"Cannot listen on {config.host}:{port}: Address already in use."


async def test_an_address_that_is_not_ours_is_named() -> None:
    error = await start_error(ServerConfig(host="192.0.2.1", port=0, ops_port=0), ScriptedEngine())
    assert error.param == "server.host"


@pytest.mark.parametrize("field", ["api_key_file", "chat_template"])
async def test_a_missing_file_is_named_before_the_engine_starts(field: str, tmp_path: Path) -> None:
    files: dict[str, Any] = {field: str(tmp_path / "missing")}
    config = Config(server=ServerConfig(port=0, ops_port=0, **files))
    with pytest.raises(ConfigError) as caught:  # the start of this engine would not end
        await lifecycle.run(config, ScriptedEngine(), Listener(), INSTRUMENTS, lambda _: None)
    assert caught.value.param == f"server.{field}"


async def test_a_chat_template_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("mine: {{ messages[0].content }}")
    async with running(tmp_path, chat_template=str(tmp_path / "mine.jinja")) as server:
        await server.until("/readyz", 200)
        server.engine.reply = says("x")
        messages = [{"role": "user", "content": "Hi"}]
        assert await server.status("/v1/chat/completions", json={"messages": messages}) == 200
    assert bytes(server.engine.requests[0].prompt_token_ids) == b"mine: Hi"


async def test_a_checkpoint_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    engine = ScriptedEngine(info=engine_info(checkpoint_dir=str(tmp_path)))
    error = await start_error(ServerConfig(port=0, ops_port=0), engine)
    assert error.param == "model.path"
    assert "tokenizer.json" in error.message
