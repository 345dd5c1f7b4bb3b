"""The front end's handle of the telemetry process: starts it, once more when it has died, and asks it.

Nothing here waits for it: facts that it does not take are dropped, and a question has a deadline.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec

from roseinfer.config.options import Config
from roseinfer.errors import NotReady
from roseinfer.observe.gaps.attribution import ledger_json
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.telemetry.facts import Fact, LedgerQuery, Page, PageQuery
from roseinfer.observe.telemetry.forwarder import Forwarder
from roseinfer.observe.telemetry.link import Link, Reply
from roseinfer.records import QueueReport, RequestTimeline
from roseinfer.runtime.child_process import waited_s
from roseinfer.runtime.fork_server import Begun, ForkServer
from roseinfer.runtime.passage import make_passage

RESTART_WINDOW_S = 600.0  # in which there is one restart: what kills two in succession will kill a third
PAGE_TIMEOUT_S = 3.0  # for a page of metrics
LEDGER_TIMEOUT_S = 0.25  # an answer waits for it
HANG_S = 10.0  # without an answer though it had a core, after which it counts as dead
START_S = 60.0  # likewise, before its first answer
LOOK_INTERVAL_S = 2.0
CLOSE_TIMEOUT_S = 1.5  # in which it takes the last facts and exports its spans, if it has a core
LONGEST_CLOSE_S = 3.0

TakeOver = Callable[[], Coroutine[Any, Any, None]]
"""Serves the operations port without the process, as far as that is possible."""

COMMAND = ("-P", "-m", "roseinfer", "telemetry", "--fd")  # -P: import nothing from the current directory

_log = logging.getLogger(__name__)


class Setup(msgspec.Struct, frozen=True):
    """What the process that forks gets first."""

    config: Config
    more_keys: str  # added to those of the file
    num_ports: int  # sockets at which the operations port listens; behind this their descriptors come, and a passage's


class TelemetryProcess:
    """Runs the process, and has facts forwarded to it. All methods belong to one event loop.

    It is a fork of a process that has imported everything, since a restart that imports would take a core from the
    streams. Both have sessions of their own, so that Ctrl-C does not reach them, and die with the front end. `command`
    starts the one that forks, with the descriptor of its end of a socket as the last argument, unless one is `begun`.
    """

    def __init__(
        self,
        config: Config,
        forwarder: Forwarder,
        report_queue: Callable[[], QueueReport],
        more_keys: str = "",
        command: Sequence[str] = COMMAND,
        begun: Begun | None = None,
    ) -> None:
        self.num_restarts = 0
        self.pid: int | None = None  # once it is known
        self.passage, self._other_end = make_passage()
        self._config = config
        self._forwarder = forwarder
        self._report_queue = report_queue
        self._more_keys = more_keys
        self._command = command
        self._begun = begun
        self._starter = ThreadPoolExecutor(1, "roseinfer-telemetry")  # a child dies with the thread that started it
        self._next_restart_s = -math.inf
        self._forks: ForkServer
        self._link: Link | None = None
        self._replies: dict[str, Reply] = {}
        self._ports: list[socket.socket] = []
        self._launching: asyncio.Task[None] | None = None
        self._take_over: TakeOver
        self._watching: asyncio.Task[None] | None = None
        self._launched_s = 0.0
        self._has_been_ready = False
        self._is_closing = False

    async def start(self, replies: Mapping[str, Reply], ports: Sequence[socket.socket], take_over: TakeOver) -> None:
        """Starts it, to serve the operations port at these sockets; when it has gone for good, `take_over` is called.

        `replies` answer what it asks, beside those of this class.
        """
        self._ports, self._take_over = list(ports), take_over
        self._replies = {
            "started": self._note_pid,
            "sync": self._sync,
            "load": self._load,
            "look": self._look,
            **replies,
        }
        descriptors = [opened.fileno() for opened in (*ports, self._other_end)]
        setup = Setup(self._config, self._more_keys, len(ports))
        self._forks = ForkServer(self._command, msgspec.msgpack.encode(setup), descriptors, self._begun)
        self._watching = asyncio.create_task(self._watch(), name="telemetry-watch")
        await self._launch()

    async def ready(self) -> None:
        """Return when it observes. Raises ConfigError for what it cannot do."""
        if self._link is not None:
            with contextlib.suppress(NotReady):  # it has died, and is started again
                await self._link.ask("ready")
                self._has_been_ready = True

    async def _launch(self) -> None:
        self.pid = None
        ours, theirs = socket.socketpair()
        with theirs:
            await asyncio.get_running_loop().run_in_executor(self._starter, self._forks.fork, theirs)
        forwarder = self._forwarder
        link = Link(self._replies, _refuse, self._on_lost, forwarder.cut, self.resume)
        ours.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
        self._link, self._launched_s = link, time.monotonic()
        self.resume()

    def resume(self) -> None:
        """Sends what is true now, after facts were dropped, and every fact from now on."""
        assert self._link is not None
        self._forwarder.resume(self._link.send, self.num_restarts)

    def _on_lost(self) -> None:
        self._forwarder.lose()
        self._link = None
        if self._is_closing:
            return
        now_s = time.monotonic()
        if now_s < self._next_restart_s:
            _log.error("the telemetry process has died again: there are no metrics until the server is started anew")
            self._launching = asyncio.create_task(self._go_without(), name="take-over")
            return
        self._next_restart_s = now_s + RESTART_WINDOW_S
        self.num_restarts += 1
        _log.error("the telemetry process has died and is started again")
        self._launching = asyncio.create_task(self._launch_again(), name="telemetry")

    async def _launch_again(self) -> None:
        try:
            await self._launch()
        except OSError as error:  # descriptors, processes or memory are too few
            _log.error("the telemetry process cannot be started: %s; there are no metrics from now on", error)
            await self._go_without()

    async def _go_without(self) -> None:
        self._starter.submit(self._forks.kill)
        self._other_end.close()
        await self._take_over()

    async def _watch(self) -> None:
        """Ends a process that hangs, so that there is another one. One that only waits for a core does not hang."""
        judged: Link | None = None
        heard_s = limit_s = 0.0
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            link = self._link
            if link is None:
                continue
            if link is not judged:
                judged, limit_s = link, START_S
                heard_s = self._launched_s
            num_sent = self._forwarder.num_sent
            with contextlib.suppress(TimeoutError, NotReady):
                await link.ask("ready", timeout_s=LOOK_INTERVAL_S)
                self._forwarder.num_taken = num_sent  # before the question
                heard_s, limit_s = time.monotonic() - self._waited_s(), HANG_S
            if self._link is not link:
                continue  # it has died meanwhile, and the next one's waits for a core are not its own
            if time.monotonic() - self._waited_s() - heard_s > limit_s:
                _log.error("the telemetry process has not answered for %g s and is ended", limit_s)
                self._kill()
                heard_s = math.inf

    def _waited_s(self) -> float:
        return waited_s(self.pid or self._forks.pid)

    def _kill(self) -> None:
        if self.pid is None:
            self._starter.submit(self._forks.kill)
        else:
            os.kill(self.pid, signal.SIGKILL)  # the process that forks waits for no child before it makes another

    async def close(self) -> None:
        """Sends the last facts and waits a little for its exit. Before it observes there are none, and no wait."""
        self.passage.close()
        self._other_end.close()
        if self._watching is None:
            return  # it was never started
        self._is_closing = True
        self._watching.cancel()
        if self._launching is not None:
            await asyncio.wait({self._launching})
        if self._link is not None:
            self._forwarder.catch_up()
            self._link.close()
        for port in self._ports:
            port.close()
        limits = (CLOSE_TIMEOUT_S, LONGEST_CLOSE_S) if self._has_been_ready else (0.0, 0.0)
        if not await asyncio.to_thread(self._forks.close, self.pid or 0, *limits) and self._has_been_ready:
            _log.warning("the telemetry process had no time for its last facts, log lines and spans")
        self._starter.shutdown(wait=False)

    # --- questions ----------------------------------------------------------------------------------------------------

    async def page(self, accept: str, *, is_load: bool, takes_gzip: bool) -> Page:
        """Returns a page: `/metrics`, or `/metrics/load`. Raises NotReady where there is none in time."""
        if self._link is None:
            raise NotReady("The telemetry process, which has the metrics, is not running.")
        self._forwarder.catch_up()
        try:
            query = PageQuery(accept.encode(errors="replace").decode(), is_load, takes_gzip)
            content = await self._link.ask("page", msgspec.msgpack.encode(query), PAGE_TIMEOUT_S)
        except TimeoutError:
            raise NotReady("The telemetry process, which has the metrics, does not answer.") from None
        return msgspec.msgpack.decode(content, type=Page)

    async def ledgers(self, timelines: Sequence[RequestTimeline], until_ns: int) -> list[dict[str, object]]:
        """Returns the ledgers of requests in flight; where causes are not known in time, all is `unknown`.

        They end when the causes are known, some time after `until_ns`, which is now: the client waits for that too.
        """
        asked_ns = time.monotonic_ns()
        known = [replace(each, token_ns=each.token_ns.copy(), arrivals=each.arrivals[-1:]) for each in timelines]
        causes = await self._causes(known)
        until_ns += time.monotonic_ns() - asked_ns
        return [ledger_json(each, decode_ns, until_ns) for each, decode_ns in zip(known, causes, strict=True)]

    async def _causes(self, timelines: Sequence[RequestTimeline]) -> list[dict[Cause, int]]:
        nothing: list[dict[Cause, int]] = [
            {Cause.UNKNOWN: each.token_ns[-1] - each.token_ns[0]} if len(each.token_ns) > 1 else {}
            for each in timelines
        ]
        if self._link is None or not any(nothing):
            return nothing
        self._forwarder.catch_up()
        query = msgspec.msgpack.encode(LedgerQuery([each.serial for each in timelines]))
        try:
            answer = await self._link.ask("ledger", query, LEDGER_TIMEOUT_S)
        except (NotReady, TimeoutError):
            return nothing
        found = msgspec.msgpack.decode(answer, type=list[dict[Cause, int]])
        return [
            causes if sum(causes.values()) == sum(unknown.values()) else unknown
            for causes, unknown in zip(found, nothing, strict=True)
        ]

    def _note_pid(self, pid: bytes) -> bytes:
        self.pid = int(pid)
        return b""

    def _sync(self, _: bytes) -> bytes:
        self._forwarder.catch_up()
        return b""

    def _load(self, _: bytes) -> bytes:
        return msgspec.msgpack.encode(self._forwarder.load())

    def _look(self, _: bytes) -> bytes:
        self._forwarder.catch_up()
        return self._forwarder.present(self._report_queue())


def _refuse(message: Fact) -> None:
    raise AssertionError(f"telemetry sends no facts, and sent a {type(message).__name__}")
