"""Builds what `roseinfer serve` runs in its first process, the front end, and serves.

Facts are observed by the telemetry process (`observing.py`); with the engine in a thread, which is for tests, debuggers
and profilers, by this one.
"""

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Awaitable
from functools import cache, partial
from pathlib import Path

import msgspec

from roseinfer import __version__
from roseinfer.cli.output_files import check_folder
from roseinfer.config.options import Config
from roseinfer.engine.link.client import AsyncEngine
from roseinfer.messages import EngineInfo, ProfileEnded
from roseinfer.observe import logs, otel
from roseinfer.observe.gaps.interruptions import LiveInterruptions, hear_interruptions
from roseinfer.observe.telemetry.forwarder import Forwarder
from roseinfer.observe.telemetry.process import COMMAND, TelemetryProcess
from roseinfer.runtime import memory
from roseinfer.runtime.child_process import live_as_child
from roseinfer.runtime.cpu_waits import LoopWaits
from roseinfer.runtime.fork_server import Begun, fork_here
from roseinfer.runtime.gc_pauses import GcPauses
from roseinfer.runtime.niceness import FRONT_END_NICENESS, be_nicer
from roseinfer.server import lifecycle
from roseinfer.server.app import Instruments
from roseinfer.text.grammar.checker import GrammarChecker
from roseinfer.wiring import build_client

_SWITCH_INTERVAL_S = 0.001  # the event loop waits this long for each busy thread; Python's default is five times that

_log = logging.getLogger(__name__)


def serve(config: Config, more_keys: str = "") -> int:
    """Serve until a signal; `more_keys` are added to the file's. Returns the exit code. Raises ConfigError."""
    if config.observe.capture_dir:  # or the first breach, which may come once, finds that it cannot be kept
        check_folder("observe.capture_dir", Path(config.observe.capture_dir))
    has_processes = config.engine.transport == "process"
    begun = fork_here(COMMAND) if has_processes else None
    if isinstance(begun, socket.socket):  # in the fork
        return _telemetry(begun)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    if has_processes:
        memory.prefer_giving_back()
    output = logs.configure(config.observe, sys.stderr)
    gc_pauses, loop_waits = GcPauses(), LoopWaits()
    facts = (_FactsElsewhere if has_processes else _FactsHere)(config, output, gc_pauses, loop_waits)
    client = build_client(config, facts.hub)
    checker = GrammarChecker(config.structured, lambda: client.info)
    instruments = facts.instruments(client, checker, more_keys, begun)

    # Once, after the engine started, which would inherit it; a later one is started by a thread that is not nicer.
    become_nicer = cache(partial(be_nicer, FRONT_END_NICENESS if has_processes else 0))

    def on_ready(url: str) -> None:
        facts.set_engine_info(client.info)
        become_nicer()
        _settle(config, client.info, url)

    try:
        with gc_pauses, asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(loop_waits.selector())) as runner:
            return runner.run(lifecycle.run(config, client, facts.hub, instruments, on_ready, more_keys))
    finally:
        for opened in (facts, checker, output):
            opened.close()


def _telemetry(control: socket.socket) -> int:
    """What `TelemetryProcess` talks to, as a fork that has this process's modules already."""
    live_as_child()
    be_nicer(FRONT_END_NICENESS)  # before it imports; its forks become nicer
    from roseinfer.observing import telemetry_main

    return telemetry_main(control.detach())


class _FactsElsewhere:
    """Has the facts of this process observed by the telemetry process."""

    def __init__(self, config: Config, output: logs.LogOutput, gc_pauses: GcPauses, loop_waits: LoopWaits) -> None:
        is_traced = bool(otel.exporter_names("traces", config.tracing.endpoint, otel.sdk_environment()))
        self._config = config
        self._forwarder = Forwarder(lambda: output.num_dropped, is_traced=is_traced)
        self.hub = self._forwarder.hub
        self.set_engine_info = self._forwarder.set_engine_info
        self.hub.on_write_returned, self.hub.on_step_read = loop_waits.glance, loop_waits.note_message
        hear_interruptions(gc_pauses, loop_waits, LiveInterruptions(), self._forwarder.note_interruption)

    def instruments(
        self, client: AsyncEngine, checker: GrammarChecker, more_keys: str, begun: Begun | None
    ) -> Instruments:
        report_queue = client.queue_estimate.report
        telemetry = TelemetryProcess(self._config, self._forwarder, report_queue, more_keys, begun=begun)

        return Instruments(telemetry.page, telemetry.ledgers, (), checker, telemetry)

    def close(self) -> None:
        """Do nothing: the server's end is the telemetry process's."""


class _FactsHere:
    """Observes the facts of this process itself."""

    def __init__(self, config: Config, output: logs.LogOutput, gc_pauses: GcPauses, loop_waits: LoopWaits) -> None:
        from roseinfer.observe.observation import Observation

        self._observation = Observation(config, __version__, lambda: output.num_dropped, gc_pauses.take)
        self._observation.listen(gc_pauses, loop_waits)
        self._config = config
        self.hub = self._observation.hub
        self.close = self._observation.close

    def instruments(self, client: AsyncEngine, checker: GrammarChecker, _: str, __: Begun | None) -> Instruments:
        from roseinfer import observing

        async def profile(num_steps: int, directory: str) -> Awaitable[ProfileEnded]:
            return client.profile(num_steps, directory)

        observation = self._observation
        observation.capture.profile = profile
        observation.flight.queue = client.queue_estimate.report
        routes = observing.debug_routes(self._config, observation, profile)
        return Instruments(observation.page, observation.ledgers, routes, checker)

    def set_engine_info(self, info: EngineInfo) -> None:
        self._observation.set_engine_info(info, self.hub.entered_ns)


def _settle(config: Config, info: EngineInfo, url: str) -> None:
    """End the start-up: freeze what it made, and log what serves."""
    gc.collect()
    gc.freeze()  # later collections need not walk it
    if info.device == "cpu" and not info.kernels and config.runner.kernels != "off":
        _log.warning("no compiled kernels were found, so plain torch serves; `roseinfer kernels build` makes them")
    facts = msgspec.structs.asdict(info) | {"sampling_defaults": msgspec.structs.asdict(info.sampling_defaults)}
    _log.info("ready on %s", url, extra=facts)
