"""The composition root: builds the engine, its client and the server from the concrete classes.

The thread transport calls `build_engine` in its thread, the process transport in its child.
"""

import asyncio
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path

import msgspec

from roseinfer import __version__
from roseinfer.config.options import Config
from roseinfer.engine import loop as engine_loop
from roseinfer.engine.core.constraint import Grammars
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.core.scheduler import Scheduler
from roseinfer.engine.core.stopwatch import Phases
from roseinfer.engine.link.client import AsyncEngine
from roseinfer.engine.link.frames import EngineLink
from roseinfer.engine.link.heartbeat import receive_heartbeat
from roseinfer.engine.link.transport import BuildEngine, ProcessTransport, ThreadTransport, Transport
from roseinfer.engine.pace import Pace
from roseinfer.engine.queue_estimate import QueueEstimate
from roseinfer.engine.speculation import Speculation
from roseinfer.messages import EngineInfo, StartupProgress
from roseinfer.observe import logs
from roseinfer.observe.hub import Hub
from roseinfer.observe.tracing.nvtx import make_marker
from roseinfer.records import LifecycleState, Observer
from roseinfer.runtime import memory
from roseinfer.runtime.cpu_waits import LoopWaits
from roseinfer.runtime.gc_pauses import GcPauses
from roseinfer.runtime.niceness import FRONT_END_NICENESS, be_nicer

_log = logging.getLogger(__name__)

_LARGE_PAGE = 16384  # bytes, from which on a page is compressed, in another thread
_PR_SET_PDEATHSIG = 1  # prctl(2)
_LAST_WORDS_TIMEOUT_S = 1.0
_SWITCH_INTERVAL_S = 0.001  # the event loop waits this long for each busy thread; Python's default is five times that


class _StartupClock:
    """Reports the stages of the start-up, and measures them."""

    def __init__(self, on_progress: Callable[[StartupProgress], None]) -> None:
        self._on_progress = on_progress
        self._began_ns = time.monotonic_ns()
        self._stage = ""
        self.elapsed_s: dict[str, float] = {}

    def enter(self, state: LifecycleState, stage: str, detail: str) -> None:
        self.stop()
        self._stage = stage
        self._on_progress(StartupProgress(state, stage, detail))

    def stop(self) -> None:
        now_ns = time.monotonic_ns()
        if self._stage:
            self.elapsed_s[self._stage] = self.elapsed_s.get(self._stage, 0.0) + (now_ns - self._began_ns) / 1e9
        self._began_ns = now_ns


def build_engine(config: Config, on_progress: Callable[[StartupProgress], None]) -> Engine:
    """Load the model and build an engine, warm and ready to step.

    Raises ConfigError for a value the user gave, and otherwise as loading a model does.
    """
    limits = config.scheduler.limits
    clock = _StartupClock(on_progress)
    clock.enter(LifecycleState.LOADING, "import", "importing torch")
    memory.prefer_huge_pages()
    memory.map_large_pieces()  # until `keep_freed_memory`
    from roseinfer.model.device_stream import TorchProfiler
    from roseinfer.model.runner import load_runner

    runner = load_runner(config, limits.max_active_seqs, clock.enter)
    clock.enter(LifecycleState.WARMUP, "grammar", "reading the vocabulary for structured output")
    grammars = _build_grammars(runner.info)
    memory.give_back()  # what only loading and reading needed
    memory.keep_freed_memory()
    clock.enter(LifecycleState.WARMUP, "warmup", "running the shapes that requests will have")
    runner.warm_up(limits.max_num_batched_tokens)
    clock.stop()
    info = msgspec.structs.replace(runner.info, startup_s=clock.elapsed_s)
    pace = Pace.of(config.scheduler, config.cache.block_size, is_cpu=info.device == "cpu")
    scheduler = Scheduler(
        config.scheduler,
        config.cache,
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        eos_token_ids=tuple(info.eos_token_ids),
        grammars=grammars,
        pacer=pace,
        make_drafter=partial(Speculation, pace) if _can_speculate(config, info) else None,
    )
    phases = Phases(make_marker(enabled=config.observe.nvtx))
    profiler = TorchProfiler(info.device)
    return Engine(scheduler, runner, phases, info, _pipeline_depth(config, info), profiler)


def _pipeline_depth(config: Config, info: EngineInfo) -> int:
    """The pipeline depth; a depth that was asked for and cannot be is told in the log."""
    depth = config.runner.pipeline_depth_on(info.device)
    if config.runner.pipeline_depth not in {"auto", depth}:
        _log.warning("runner.pipeline_depth is 0 on a CPU, where there is nothing to overlap")
    return depth


def _can_speculate(config: Config, info: EngineInfo) -> bool:
    """Whether a row has the same bits whatever its step holds, and no step is launched before one is read."""
    from roseinfer.model.families.registry import FAMILIES
    from roseinfer.model.families.tested import TESTED

    exact_types = {family.model_type for family in FAMILIES.values()}
    exact_types |= {name for name, findings in TESTED.items() if findings.is_exact}
    can_speculate = info.device == "cpu" and info.linear != "torch" and info.model_type in exact_types
    if not can_speculate and config.scheduler.speculation not in {"auto", "off"}:
        _log.warning(
            "scheduler.speculation is off: only on a CPU, with rows exact in every batch, do drafts change no answer"
        )
    return can_speculate


def _build_grammars(info: EngineInfo) -> Grammars | None:
    """Read the vocabulary at start-up, since the library holds the interpreter meanwhile.

    None for a checkpoint whose vocabulary cannot be read: it serves token ids, and its front end refuses grammars.
    """
    from roseinfer.text.grammar.compiler import GrammarCompiler, Vocabulary

    try:
        vocabulary = Vocabulary.load(Path(info.checkpoint_dir), info.vocab_size, info.eos_token_ids)
    except (OSError, ValueError) as error:
        _log.warning("no structured output: the vocabulary cannot be read: %s", error)
        return None
    return GrammarCompiler(vocabulary)


def _checks_when_idle(config: Config) -> bool:
    return config.observe.log_level == "debug"


def build_client(config: Config, observers: Sequence[Observer]) -> AsyncEngine:
    """An engine client over the configured transport, not started, that reports facts to the observers."""
    return _client(config, Hub(observers))


def _client(config: Config, observer: Observer) -> AsyncEngine:
    transport: Transport
    if config.engine.transport == "process":
        transport = ProcessTransport(config)
    else:
        transport = ThreadTransport(config, build_engine, check_when_idle=_checks_when_idle(config))
    estimate = QueueEstimate.of(config.scheduler)
    return AsyncEngine(transport, observer, config.engine.step_timeout_s, estimate)


def engine_main(fd: int, build: BuildEngine = build_engine) -> int:
    """The child process of `ProcessTransport`: an engine at the other end of the socket `fd`. Returns the exit code."""
    _die_with_parent()
    # A service manager signals this process too, but the front end decides when it ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=fd) as connection:
        try:
            heartbeat = receive_heartbeat(connection)
            link = EngineLink(connection)
            config = msgspec.msgpack.decode(link.receive_bytes(), type=Config)
            with closing(logs.configure(config.observe, sys.stderr)):
                build_engine_here = partial(build, config, link.send)
                is_sound = engine_loop.run(
                    build_engine_here, link, link, check_when_idle=_checks_when_idle(config), heartbeat=heartbeat
                )
                link.drain(_LAST_WORDS_TIMEOUT_S)
        except EOFError:
            return 0
    return 0 if is_sound else 70


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends; elsewhere end-of-file has to do."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)  # it ended before the kernel was asked


def serve(config: Config, more_keys: str = "") -> int:
    """Serve until a signal; `more_keys` are added to the file's. Returns the exit code. Raises ConfigError."""
    # Imported here because the engine's process imports this file too and needs none of them.
    from aiohttp import web

    from roseinfer.observe.observation import Observation
    from roseinfer.observe.recorder import capture
    from roseinfer.observe.recorder.rendering import RenderProcess
    from roseinfer.server import lifecycle
    from roseinfer.server.app import LOAD_PATH, Instruments
    from roseinfer.server.ops import debug, profile
    from roseinfer.text.grammar.checker import GrammarChecker

    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    if config.engine.transport == "process":
        memory.prefer_giving_back()
    renderer, gc_pauses, loop_waits = RenderProcess(), GcPauses(), LoopWaits()
    output = logs.configure(config.observe, sys.stderr)
    observation = Observation(config, __version__, renderer.render, gc_pauses, loop_waits, lambda: output.num_dropped)
    client = _client(config, observation.hub)
    observation.capture.profile = client.profile
    observation.flight.queue = client.queue_estimate.report

    async def handle_metrics(request: web.Request) -> web.Response:
        observation.hub.catch_up()
        accept = request.headers.get("Accept", "")
        if request.path == LOAD_PATH:
            page, content_type = observation.metrics.render_load(accept)
        else:
            page, content_type = await asyncio.to_thread(observation.metrics.render, accept)
        response = web.Response(body=page, headers={"Content-Type": content_type}, zlib_executor_size=_LARGE_PAGE)
        if len(page) >= _LARGE_PAGE:
            response.enable_compression()  # where the scraper takes it, as Prometheus does
        return response

    observe = config.observe
    new_directory = partial(capture.profile_directory, observe.capture_dir, observe.capture_max_mib)
    write_manifest = partial(capture.write_profile_manifest, observation.capture.facts)
    debug_routes = [*debug.routes(observation.flight), profile.route(new_directory, write_manifest)]
    debug_routes.append(debug.invariants_route(observation.integrity.report))
    checker = GrammarChecker(config.structured, lambda: client.info)
    instruments = Instruments(handle_metrics, observation.ledger, debug_routes, checker)

    # Once, after the engine started, which would inherit it; a later one is started by a thread that is not nicer.
    become_nicer = cache(partial(be_nicer, FRONT_END_NICENESS if config.engine.transport == "process" else 0))

    def on_ready(url: str) -> None:
        observation.set_engine_info(client.info)
        become_nicer()
        _settle(config, client.info, url)

    try:
        with gc_pauses, asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(loop_waits.selector())) as runner:
            return runner.run(lifecycle.run(config, client, observation.hub, instruments, on_ready, more_keys))
    finally:
        for opened in (observation, renderer, checker, output):
            opened.close()


def _settle(config: Config, info: EngineInfo, url: str) -> None:
    """End the start-up: freeze what it made, and log what serves."""
    gc.collect()
    gc.freeze()  # later collections need not walk it
    if info.device == "cpu" and not info.kernels and config.runner.kernels != "off":
        _log.warning("no compiled kernels were found, so plain torch serves; `roseinfer kernels build` makes them")
    facts = msgspec.structs.asdict(info) | {"sampling_defaults": msgspec.structs.asdict(info.sampling_defaults)}
    _log.info("ready on %s", url, extra=facts)
