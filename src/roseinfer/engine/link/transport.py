"""Transports: run the engine in a thread or in a process of its own, and carry messages there and back.

Both carry the same messages in the same order; one set of contract tests covers both.
"""

import asyncio
import queue
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Protocol

import msgspec

from roseinfer.config.options import Config
from roseinfer.engine import loop as engine_loop
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.kv_events import publishing
from roseinfer.engine.link.frames import CommandEncoder
from roseinfer.engine.link.heartbeat import Heartbeat, SharedHeartbeat
from roseinfer.errors import EngineDead
from roseinfer.messages import Command, Event, Shutdown, StartupProgress
from roseinfer.runtime.child_process import end_process, start_process
from roseinfer.runtime.frames import FrameBuffer, encode_frame

BuildEngine = Callable[[Config, Callable[[StartupProgress], None]], Engine]
_ENGINE_COMMAND = ("-P", "-m", "roseinfer", "engine", "--fd")  # -P: import nothing from the current directory
_CLOSE_TIMEOUT_S = 1.5  # less than the server gives `close` as a whole


class Transport(Protocol):
    """Carries commands to an engine and events back. All methods belong to one event loop."""

    async def start(self, on_event: Callable[[Event], None], on_death: Callable[[str], None]) -> None:
        """Start the engine. Both callbacks run on the event loop. Raises EngineDead where the system starts none.

        `on_death(reason)` is called once, after the last event, unless `close` was called before.
        """

    @property
    def heartbeat(self) -> Heartbeat:
        """What the engine is doing, from `start` on."""

    def send(self, command: Command) -> None:
        """Send a command, in order, without blocking. Ignored when the engine is gone."""

    def kill(self) -> None:
        """End an engine that does not answer, as far as that is possible; it is dead once `on_death` is called."""

    async def close(self) -> None:
        """Stop the engine and wait until it is gone. Idempotent."""


class QueueInbox(queue.SimpleQueue[Command]):
    """`Inbox` of `engine/loop.py` for a thread."""

    def receive(self, *, wait: bool, timeout_s: float | None = None) -> list[Command]:
        commands: list[Command] = []
        with suppress(queue.Empty):
            if wait:
                commands.append(self.get(timeout=timeout_s))
            while True:
                commands.append(self.get_nowait())
        return commands


class CallbackOutbox:
    """`Outbox` of `engine/loop.py` for a thread: passes every event to a callable that does not block."""

    depth = 0
    is_full = False

    def __init__(self, deliver: Callable[[Event], None]) -> None:
        self.send = deliver


class ThreadTransport:
    """Runs the engine in a thread of this process, with its GIL. For tests, debuggers and profilers."""

    def __init__(self, config: Config, build_engine: BuildEngine, *, check_when_idle: bool = False) -> None:
        self._config = config
        self._build_engine = build_engine
        self._check_when_idle = check_when_idle
        self._inbox = QueueInbox()
        self.heartbeat = Heartbeat()
        self._thread: threading.Thread | None = None
        self._is_closing = False

    async def start(self, on_event: Callable[[Event], None], on_death: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()

        def report_death() -> None:
            if not self._is_closing:
                on_death("the engine's thread has ended")

        def post(callback: Callable[..., None], *args: Event) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(callback, *args)

        def run() -> None:
            try:
                self._run(lambda event: post(on_event, event))
            finally:
                post(report_death)

        self._thread = threading.Thread(target=run, name="roseinfer-engine", daemon=True)
        self._thread.start()

    def _run(self, deliver: Callable[[Event], None]) -> None:
        build = partial(self._build_engine, self._config, deliver)
        outbox = CallbackOutbox(deliver)
        engine_loop.run(
            build,
            self._inbox,
            outbox,
            check_when_idle=self._check_when_idle,
            heartbeat=self.heartbeat,
            publishing=partial(publishing, self._config),
        )

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    def kill(self) -> None:
        """Do nothing: a thread cannot be ended from outside."""

    async def close(self) -> None:
        self._is_closing = True
        self._inbox.put(Shutdown())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_S)


class ProcessTransport:
    """Runs the engine in a child process with its own interpreter, over an inherited socketpair: no file, no port.

    End-of-file on the link means that the child has died. It has a session of its own, so that Ctrl-C does not reach
    it, and dies with its parent. `command` starts it, with the descriptor number as its last argument.

    After `close` it may be started again. All children are started by one thread, which keeps the niceness that this
    process had at the first start: a niceness belongs to a thread, and a child inherits it.
    """

    def __init__(self, config: Config, command: tuple[str, ...] = _ENGINE_COMMAND) -> None:
        self._config = config
        self._command = command
        self.heartbeat = Heartbeat()
        self._starter = ThreadPoolExecutor(1, "roseinfer-starter")  # a child dies with the thread that started it
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._encoder: CommandEncoder  # of the engine that was started last
        self._reading: asyncio.Task[None] | None = None
        self._is_closing = False

    @property
    def pid(self) -> int | None:
        """The child's process id once started."""
        return None if self._process is None else self._process.pid

    async def start(self, on_event: Callable[[Event], None], on_death: Callable[[str], None]) -> None:
        try:
            ours = await self._launch()
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no thread to be had
            raise EngineDead(f"The engine's process cannot be started: {error}.") from None
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._encoder = CommandEncoder()  # a new engine has not seen what the last one was sent
        self._writer.write(encode_frame(msgspec.msgpack.encode(self._config)))
        self._reading = asyncio.create_task(self._read(reader, on_event, on_death), name="engine-link")
        self._reading.add_done_callback(_report)

    async def _launch(self) -> socket.socket:
        """Start the child, and return this end of the link."""
        ours, theirs = socket.socketpair()
        with theirs:
            shared = SharedHeartbeat()
            self.heartbeat, self._is_closing = shared.heartbeat, False
            start = partial(self._start_child, theirs.fileno())
            self._process = await asyncio.get_running_loop().run_in_executor(self._starter, start)
        with suppress(BrokenPipeError):  # it has ended already, as who reads from it will see
            shared.send(ours)
        return ours

    def _start_child(self, descriptor: int) -> subprocess.Popen[bytes]:
        return start_process([*self._command, str(descriptor)], stdin=subprocess.DEVNULL, pass_fds=[descriptor])

    async def _read(
        self, reader: asyncio.StreamReader, on_event: Callable[[Event], None], on_death: Callable[[str], None]
    ) -> None:
        buffer = FrameBuffer()
        decoder = msgspec.msgpack.Decoder(Event)
        try:
            with suppress(ConnectionError):  # the same news as end-of-file
                while data := await reader.read(1 << 18):
                    for frame in buffer.feed(data):
                        on_event(decoder.decode(frame))
        finally:  # a mistake of ours must not leave streams waiting for ever
            if not self._is_closing:
                on_death(f"the engine process {await self._wait_exit()}")

    async def _wait_exit(self) -> str:
        """How the child ended, in words."""
        assert self._process is not None
        try:
            code = await asyncio.to_thread(self._process.wait, 1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "closed its link"
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"

    def send(self, command: Command) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(self._encoder.encode(command))

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        if self._process is None:
            return
        self._is_closing = True
        self.send(Shutdown())
        await asyncio.to_thread(end_process, self._process, _CLOSE_TIMEOUT_S)
        if self._reading is not None:
            await asyncio.wait({self._reading})
        if self._writer is not None:
            self._writer.close()


def _report(task: "asyncio.Task[None]") -> None:
    """Report an error of the task to the event loop at once, not when the task is collected."""
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler({"message": "reading from the engine failed", "exception": error})
