"""Builds what observes: the telemetry process of `roseinfer serve`, and the routes of its operations port."""

import asyncio
import gc
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial

import msgspec
from aiohttp import web

from roseinfer import __version__
from roseinfer.config.options import Config
from roseinfer.errors import ConfigError
from roseinfer.messages import BeginProfile
from roseinfer.observe import logs
from roseinfer.observe.metrics.totals import Load
from roseinfer.observe.observation import Observation, import_exporters
from roseinfer.observe.recorder.capture_files import profile_directory, write_profile_manifest
from roseinfer.observe.telemetry.link import Link
from roseinfer.observe.telemetry.process import Setup
from roseinfer.observe.telemetry.receiver import Receiver
from roseinfer.runtime.fork_server import fork_children, receive_descriptors
from roseinfer.runtime.frames import receive_frame
from roseinfer.runtime.niceness import FRONT_END_NICENESS, TELEMETRY_NICENESS, be_nicer, take_turns
from roseinfer.runtime.passage import Passage
from roseinfer.server.app import PASSAGE, SCRAPE, build_ops_app, build_runner
from roseinfer.server.connection import scraping
from roseinfer.server.connection.api_keys import ApiKeys
from roseinfer.server.ops import debug, profile
from roseinfer.server.ops.front_end import FrontEnd, Refusals
from roseinfer.server.port import Port

_OPS_CLOSE_S = 0.2  # for answers of the operations port under way at the end


def telemetry_main(fd: int) -> int:
    """The process that `TelemetryProcess` starts, a child: its forks observe the facts that come over their sockets.

    `fd` is the socket over which the setup comes, then those of the operations port, the end of a passage, and then the
    sockets of its forks.
    """
    server_pid = os.getppid()
    with socket.socket(fileno=fd) as control:
        try:
            setup = msgspec.msgpack.decode(receive_frame(control), type=Setup)
            *ports, passage = receive_descriptors(control, setup.num_ports + 1)
        except (EOFError, IndexError):
            return 0
        import_exporters(setup.config)
        connection = fork_children(control)
    if connection is None:
        return 0
    be_nicer(TELEMETRY_NICENESS - FRONT_END_NICENESS)  # sooner, it would not get through its imports beside a load
    take_turns()  # a scrape wakes it several times, each time within a step whose threads wait for each other
    with connection, closing(logs.configure(setup.config.observe, sys.stderr)) as output:
        asyncio.run(_observe(connection, setup, (ports, passage), output, server_pid))
    return 0


async def _observe(
    connection: socket.socket,
    setup: Setup,
    descriptors: tuple[Sequence[int], int],
    output: logs.LogOutput,
    server_pid: int,
) -> None:
    """Observe, and serve the operations port, until the front end has gone. `descriptors` are as for `_ops_port`."""
    receiver, gone = Receiver(), asyncio.Event()

    def on_lost() -> None:
        gone.set()
        receiver.is_informed.set()  # there is nothing more to wait for

    link = Link(receiver.replies(), receiver.take, on_lost)

    def num_dropped() -> int:
        return output.num_dropped + receiver.num_dropped_log_lines

    try:
        observation = Observation(
            setup.config, __version__, num_dropped, receiver.take_gc_pauses_ns, lambda: receiver.spent_ns, server_pid
        )
    except ConfigError as error:
        receiver.refuse(error)
        await _connect(link, connection)
        await gone.wait()
        return
    try:
        receiver.open(observation)
        await _connect(link, connection)
        await receiver.is_informed.wait()  # before, a page would have counters at 0, as of another server
        async with _ops_port(setup, *descriptors, receiver, link, observation):
            await gone.wait()
    finally:
        observation.close()


async def _connect(link: Link, connection: socket.socket) -> None:
    connection.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: link, sock=connection)
    link.notify("started", str(os.getpid()).encode())


@asynccontextmanager
async def _ops_port(
    setup: Setup, ports: Sequence[int], passage: int, receiver: Receiver, link: Link, observation: Observation
) -> AsyncIterator[None]:
    """Serve the operations port at sockets, and scrapers of the API port from a passage, by their descriptors."""
    config = setup.config
    front_end = FrontEnd(link, receiver.set_present)
    observation.capture.profile = front_end.profile
    observation.flight.queue = lambda: receiver.queue
    keys = ApiKeys.configured(config.server.api_key_file, setup.more_keys)
    port = Port(config.server, Refusals(link), keys)
    port.state = receiver.state
    receiver.on_state = partial(setattr, port, "state")
    routes = debug_routes(config, observation, front_end.profile, lambda: receiver.num_tasks)
    ops_app = build_ops_app(port, observation.page, front_end.judge, routes, [front_end.ask_first])
    ops_app[SCRAPE] = _scrape_of(observation, front_end)
    ops_app[PASSAGE] = Passage(socket.socket(fileno=passage))
    runner = build_runner(ops_app, _OPS_CLOSE_S)
    await runner.setup()
    watching = None
    if keys is not None:
        watching = asyncio.create_task(keys.files.watch(keys.read, keys.replace))
    listening = [await runner.listen_at(socket.socket(fileno=descriptor)) for descriptor in ports]
    gc.collect()
    gc.freeze()  # what it has made, which later collections need not walk
    try:
        yield
    finally:
        if watching is not None:
            watching.cancel()
        for server in listening:
            server.close()
        await runner.cleanup()


def _scrape_of(observation: Observation, front_end: FrontEnd) -> scraping.Scrape:
    """Answers scrapers, with all facts so far."""

    def scrape(head: bytes, is_load: bool, take: Callable[[bytes], None]) -> None:
        def answer(packed: bytes | None) -> None:
            content = b""
            try:
                load = None if packed is None else msgspec.msgpack.decode(packed, type=Load)
                content = scraping.answer(head, partial(observation.render_page, load=load))
            finally:
                take(content)

        def answer_soon(packed: bytes | None = None) -> None:
            """Not at once: an error of the page would be one of the link."""
            asyncio.get_running_loop().call_soon(answer, packed)

        (front_end.load_then if is_load else front_end.sync_then)(answer_soon)

    return scrape


def debug_routes(
    config: Config, observation: Observation, profile_steps: BeginProfile, num_tasks: Callable[[], int] | None = None
) -> list[web.RouteDef]:
    """The routes under `/debug`; `num_tasks` counts those of the front end, where it is another process."""
    observe = config.observe
    new_directory = partial(profile_directory, observe.capture_dir, observe.capture_max_mib)
    write_manifest = partial(write_profile_manifest, observation.capture.facts)
    return [
        *debug.routes(observation.flight),
        profile.route(profile_steps, new_directory, write_manifest),
        debug.invariants_route(observation.integrity.report, num_tasks or debug.num_tasks),
    ]
