"""Runs the server from bind to exit: opens the ports, waits for the engine, drains at a signal, restarts a dead engine.

The states, and what each allows, are in `service.py`.
"""

import asyncio
import contextlib
import errno
import logging
import math
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from aiohttp import web

from roseinfer.config.options import Config, EngineConfig, ServerConfig
from roseinfer.engine.link.engine_client import EngineClient
from roseinfer.engine.link.watch import wait_for_death
from roseinfer.errors import ConfigError, EngineError, EngineFailed, NotReady
from roseinfer.messages import StartupProgress
from roseinfer.records import LifecycleState, Observer
from roseinfer.runtime import memory
from roseinfer.server.app import Instruments, Telemetry, build_app, build_ops_app, build_runner
from roseinfer.server.connection.api_keys import ApiKeys
from roseinfer.server.connection.connection import require_compiled_parser
from roseinfer.server.connection.listener import bind
from roseinfer.server.connection.tls import Certificate
from roseinfer.server.ops import debug_access, front_end, probes
from roseinfer.server.service import Service
from roseinfer.text.text_model import TextModel

EXIT_DRAINED = 0
EXIT_ENGINE_FAILED = 70  # EX_SOFTWARE of sysexits.h
FAILED_LINGER_S = 5.0  # in which `/livez` says 503, before the process ends

# After the drain, or a second signal, these add up to less than five seconds.
FAREWELL_S = 1.5  # for interrupted streams to take their error event
CONNECTIONS_CLOSE_S = 0.5  # each port
ENGINE_CLOSE_S = 2.0

RESTART_WINDOW_S = 600.0  # in which there is one restart: what kills two engines in succession will kill a third

_log = logging.getLogger(__name__)

T = TypeVar("T")


async def run(
    config: Config,
    client: EngineClient,
    observer: Observer,
    instruments: Instruments,
    on_ready: Callable[[str], None],
    more_keys: str = "",
) -> int:
    """Serve until a signal or the engine's death, and return the exit code. `on_ready` is given the API's URL.

    The ports are open before the engine is: probes and metrics answer while it loads. Raises ConfigError for a value
    that cannot be used: a taken port, an unreadable key file, a checkpoint without a tokenizer.
    """
    with _Signals() as signals:
        require_compiled_parser()
        keys = ApiKeys.configured(config.server.api_key_file, more_keys)
        certificate = Certificate.configured(config.server)
        load_text = TextModel.loader(config)
        service = Service(config, client, observer, keys, instruments.ledgers, instruments.grammar_checker)
        try:
            async with _Tasks() as tasks, _listening(service, instruments, certificate) as url:
                if keys is not None:
                    tasks.spawn(keys.files.watch(keys.read, keys.replace))
                if certificate is not None:
                    tasks.spawn(certificate.files.watch(certificate.read, certificate.replace))
                start = partial(_start, service, load_text, instruments.telemetry)
                exit_code = await _serve(service, start, signals, lambda: on_ready(url), Restarts(config.engine))
        finally:
            await _close(service)
            if instruments.telemetry is not None:
                await instruments.telemetry.close()
        _log.info("stopped with exit code %d", exit_code)
        return exit_code


class Restarts:
    """Allows restarts of the engine: one in any window of time."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_allowed = config.on_failure == "restart"
        self._clock = clock
        self._next_s = -math.inf  # from when one may be

    def allow_next(self) -> bool:
        """Whether the engine may be started again now; if so, that counts."""
        now_s = self._clock()
        if not self._is_allowed or now_s < self._next_s:
            return False
        self._next_s = now_s + RESTART_WINDOW_S
        return True


class _Signals:
    """Counts SIGTERM and SIGINT: the first asks for a drain, the second for the exit.

    The end of the terminal asks for a drain, however often it is reported: shell and kernel both do. `nohup` has it
    ignored.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._handlers = {signal.SIGTERM: self._receive, signal.SIGINT: self._receive}
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            self._handlers[signal.SIGHUP] = self.first.set

    def __enter__(self) -> Self:
        for number, handler in self._handlers.items():
            asyncio.get_running_loop().add_signal_handler(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._handlers:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _receive(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _serve(
    service: Service,
    start: Callable[[], Coroutine[Any, Any, None]],
    signals: _Signals,
    on_ready: Callable[[], None],
    restarts: Restarts,
) -> int:
    async with _Tasks() as tasks:
        stop = tasks.spawn(signals.first.wait())
        while True:
            error = await _live(service, start, signals, on_ready, stop)
            if error is None:
                return EXIT_DRAINED
            if stop.done() or not service.has_been_ready or not restarts.allow_next():
                break
            _log.error("the engine is started again: %s", error.message, exc_info=(type(error), error, None))
            service.restart()
        exit_code = _fail(service, error)
        if service.has_been_ready:  # before that no probe has been answered 200
            await asyncio.wait({tasks.spawn(signals.second.wait())}, timeout=FAILED_LINGER_S)
        return exit_code


async def _live(
    service: Service,
    start: Callable[[], Coroutine[Any, Any, None]],
    signals: _Signals,
    on_ready: Callable[[], None],
    stop: "asyncio.Task[Any]",
) -> EngineError | None:
    """Run one engine to its end, and return its error, or None after a signal."""
    async with _Tasks() as tasks:
        startup = tasks.spawn(start())
        await asyncio.wait({startup, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not startup.done():
            service.enter(LifecycleState.DRAINING)
            return None
        try:
            await startup
        except EngineError as error:
            return error
        except ConfigError as error:
            if not service.has_been_ready:
                raise
            return EngineFailed(error.message)  # the checkpoint could be used before
        on_ready()
        death = tasks.spawn(wait_for_death(service.client, service.observer))
        await asyncio.wait({death, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not death.done():
            await _drain(service, signals, death)
        return await death if death.done() else None


async def _start(service: Service, load_text: Callable[[Path], TextModel], telemetry: Telemetry | None) -> None:
    """Start the engine, and load the text side beside it, from when it is known where the checkpoint lies.

    Reading a tokenizer takes three times its memory for a moment, which is over before the engine has its most.
    """
    loader = ThreadPoolExecutor(1, "text-model")
    text: Future[TextModel] | None = None
    is_over = False

    def on_progress(progress: StartupProgress) -> None:
        nonlocal text
        if is_over:  # a signal ended the start, and the engine has not heard of it yet
            return
        if progress.checkpoint_dir and text is None:
            text = loader.submit(_load_text, load_text, Path(progress.checkpoint_dir))
        if progress.state is not LifecycleState.READY:  # which the text side may not be
            service.enter(progress.state)

    try:
        observed = telemetry.ready() if telemetry is not None else asyncio.sleep(0)
        info, _ = await asyncio.gather(service.client.start(on_progress), observed)
        text = text or loader.submit(_load_text, load_text, Path(info.checkpoint_dir))
        service.open(await asyncio.wrap_future(text))
    finally:
        is_over = True
        loader.shutdown(wait=False)


def _load_text(load_text: Callable[[Path], TextModel], checkpoint_dir: Path) -> TextModel:
    text = load_text(checkpoint_dir)
    memory.give_back()
    return text


async def _drain(service: Service, signals: _Signals, death: asyncio.Task[EngineError]) -> None:
    """Let what is running finish, within the limit; then end the rest with an error event."""
    service.enter(LifecycleState.DRAINING)
    async with _Tasks() as tasks:
        idle = tasks.spawn(service.wait_idle())
        hurry = tasks.spawn(signals.second.wait())
        await asyncio.wait(
            {idle, hurry, death}, timeout=service.config.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not death.done():  # which `_fail` logs
            _log_drained(service.num_exchanges, None if hurry.done() else service.config.drain_timeout_s)
        service.interrupt_all(NotReady("The server is shutting down."))
        await asyncio.wait({idle}, timeout=FAREWELL_S)


def _log_drained(num_cut: int, limit_s: float | None) -> None:
    """Log how many requests the drain cut; `limit_s` is None if a second signal ended it."""
    if not num_cut:
        _log.info("drained, all requests have ended")
        return
    reason = "second signal" if limit_s is None else f"drain timeout after {limit_s:g} s"
    _log.warning("%s: %d %s cut", reason, num_cut, "request was" if num_cut == 1 else "requests were")


def _fail(service: Service, error: EngineError) -> int:
    # The error's notes are the engine's own words and traceback; the frames of this process would add noise.
    _log.error("giving up: %s", error.message, exc_info=(type(error), error, None))
    service.enter(LifecycleState.FAILED)
    return EXIT_ENGINE_FAILED


async def _close(service: Service) -> None:
    service.close()
    try:
        async with asyncio.timeout(ENGINE_CLOSE_S):
            await service.client.close()
    except TimeoutError:
        _log.warning("the engine did not close within %s s", ENGINE_CLOSE_S)


class _Tasks(contextlib.AsyncExitStack):
    """Tasks that end with the block that spawned them. Unlike in a TaskGroup, one that fails cancels no other."""

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self.push_async_callback(_cancel, task)
        return task


async def _cancel(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=CONNECTIONS_CLOSE_S)


@contextlib.asynccontextmanager
async def _listening(service: Service, instruments: Instruments, certificate: Certificate | None) -> AsyncIterator[str]:
    """Open the ports, the operations port too unless it is 0, and yield the API's URL."""
    config = service.config
    async with contextlib.AsyncExitStack() as ports:
        app = build_app(service, instruments)
        port = await ports.enter_async_context(_port(app, config.host, config.port, "server.", certificate))
        if instruments.telemetry is not None:
            sockets = await _ops_sockets(config)

            async def take_over() -> None:
                """Serve probes at least, and 503 for metrics."""
                judge = probes.judge_of(service)
                app = build_ops_app(service, instruments.pages, judge, (), [debug_access.say_gone])
                runner = build_runner(app, CONNECTIONS_CLOSE_S)
                await runner.setup()
                ports.push_async_callback(runner.cleanup)
                for listening in sockets:
                    ports.enter_context(contextlib.closing(await runner.listen_at(listening)))

            await instruments.telemetry.start(front_end.replies(service), sockets, take_over)
        elif config.ops_port:
            judge = probes.judge_of(service)
            app = build_ops_app(service, instruments.pages, judge, instruments.debug_routes)
            await ports.enter_async_context(_port(app, config.ops_host, config.ops_port, "server.ops_", None))
        host = f"[{config.host}]" if ":" in config.host else config.host or "localhost"
        yield f"{'http' if certificate is None else 'https'}://{host}:{port}"


@contextlib.asynccontextmanager
async def _port(
    app: web.Application, host: str, port: int, prefix: str, certificate: Certificate | None
) -> AsyncIterator[int]:
    """Listen, and yield the port, which is a free one for 0. Raises ConfigError naming the value that is wrong."""
    runner = build_runner(app, CONNECTIONS_CLOSE_S)
    await runner.setup()
    try:
        with _naming(host, port, prefix):
            listener = await runner.listen(host, port, certificate)
        with contextlib.closing(listener):
            yield listener.sockets[0].getsockname()[1]
    finally:
        await runner.cleanup()


async def _ops_sockets(config: ServerConfig) -> list[socket.socket]:
    """Listen at the operations port for another process, unless it is 0. Raises ConfigError."""
    if not config.ops_port:
        return []
    with _naming(config.ops_host, config.ops_port, "server.ops_"):
        return await bind(config.ops_host, config.ops_port)


@contextlib.contextmanager
def _naming(host: str, port: int, prefix: str) -> Iterator[None]:
    """Raise ConfigError naming the value at which a port cannot be opened."""
    try:
        yield
    except UnicodeError:
        raise ConfigError(f"{host!r} is no host name.", param=f"{prefix}host") from None
    except OSError as error:
        param = f"{prefix}port" if error.errno in {errno.EADDRINUSE, errno.EACCES} else f"{prefix}host"
        # asyncio puts the address, and the number of the error, into its text; a resolver's numbers are negative
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(f"Cannot listen on {host}:{port}: {reason}.", param=param) from None
