"""Builds the engine and its client from the concrete classes; `serving.py` builds the server, `observing.py` telemetry.

The thread transport calls `build_engine` in its thread, the process transport in its child.
"""

import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import msgspec

from roseinfer.config.options import Config
from roseinfer.engine import loop as engine_loop
from roseinfer.engine.core.constraint import Grammars
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.core.scheduler import Scheduler
from roseinfer.engine.kv_events import publishing
from roseinfer.engine.link.client import AsyncEngine
from roseinfer.engine.link.frames import EngineLink
from roseinfer.engine.link.heartbeat import receive_heartbeat
from roseinfer.engine.link.transport import BuildEngine, ProcessTransport, ThreadTransport, Transport
from roseinfer.engine.pace import Pace
from roseinfer.engine.queue_estimate import QueueEstimate
from roseinfer.engine.ranges import make_phases
from roseinfer.engine.speculation import Speculation
from roseinfer.errors import ConfigError
from roseinfer.messages import EngineInfo, StartupProgress
from roseinfer.observe import logs
from roseinfer.observe.tracing.nvtx import make_marker
from roseinfer.records import LifecycleState, Observer
from roseinfer.runtime import memory
from roseinfer.runtime.child_process import live_as_child
from roseinfer.runtime.stand_ins import forget_stand_ins, stand_in

_log = logging.getLogger(__name__)

_LAST_WORDS_TIMEOUT_S = 1.0
# What `import torch` imports and no engine of ours uses.
_UNUSED = (
    "torch._meta_registrations",  # for tensors without numbers: 19 MB, and a quarter of a second
    *("torch.distributions", "torch.export", "torch.masked", "torch.quantization", "torch.utils.data"),  # 6 MB together
)


class _StartupClock:
    """Reports the stages of the start-up, and measures them."""

    def __init__(self, on_progress: Callable[[StartupProgress], None]) -> None:
        self._on_progress = on_progress
        self._began_ns = time.monotonic_ns()
        self._stage = ""
        self.elapsed_s: dict[str, float] = {}

    def enter(self, state: LifecycleState, stage: str, detail: str, checkpoint_dir: str = "") -> None:
        self.stop()
        self._stage = stage
        self._on_progress(StartupProgress(state, stage, detail, checkpoint_dir))

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

    forget_stand_ins()
    memory.drop_code()  # before reading tokenizer and vocabulary takes its most
    with _enough_memory("hold the model and its KV cache: take a smaller one, or free the GPU", "model.path"):
        runner = load_runner(config, limits.max_active_seqs, clock.enter)
    clock.enter(LifecycleState.WARMUP, "grammar", "reading the vocabulary for structured output")
    grammars = _build_grammars(runner.info)
    memory.give_back()  # what only loading and reading needed
    memory.drop_code()
    memory.keep_freed_memory()
    clock.enter(LifecycleState.WARMUP, "warmup", "running the shapes that requests will have")
    remedy = "lower it, cache.num_blocks or scheduler.max_num_batched_tokens"
    with _enough_memory(f"run the largest step beside the KV cache: {remedy}", "cache.memory_utilization"):
        costs = runner.warm_up(limits.max_num_batched_tokens)
    clock.stop()
    info = msgspec.structs.replace(runner.info, startup_s=clock.elapsed_s)
    pace = Pace.of(config.scheduler, config.cache.block_size, is_cpu=info.device == "cpu")
    for size, duration_ns in costs:
        pace.learn_size(size, duration_ns)
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
    phases = make_phases(make_marker(enabled=config.observe.nvtx))
    profiler = TorchProfiler(info.device)
    return Engine(scheduler, runner, phases, info, _pipeline_depth(config, info), profiler)


@contextmanager
def _enough_memory(to: str, param: str) -> Iterator[None]:
    """Raise ConfigError, and not the error of an engine that failed, where a GPU's memory does not suffice."""
    from torch import OutOfMemoryError

    try:
        yield
    except OutOfMemoryError as error:
        said = str(error).partition(" Including")[0]  # behind it are hints for those who program with torch
        raise ConfigError(f"The GPU's memory does not suffice to {to}. {said}", param=param) from None


def _pipeline_depth(config: Config, info: EngineInfo) -> int:
    """The pipeline depth; a depth that was asked for and cannot be is named in the log."""
    depth = config.runner.pipeline_depth_on(info.device)
    if config.runner.pipeline_depth not in {"auto", depth}:
        _log.warning("runner.pipeline_depth is 0 on a CPU, where there is nothing to overlap")
    return depth


def _can_speculate(config: Config, info: EngineInfo) -> bool:
    """Whether a row has the same bits whatever its step holds, and no step is launched before one is read."""
    from roseinfer.model.families.registry import FAMILIES
    from roseinfer.model.families.tested import TESTED

    exact_types = {family.model_type for family in FAMILIES.values()} | TESTED.keys()
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


def build_client(config: Config, observer: Observer) -> AsyncEngine:
    """An engine client over the configured transport, not started, that reports facts to the observer."""
    transport: Transport
    if config.engine.transport == "process":
        transport = ProcessTransport(config)
    else:
        transport = ThreadTransport(config, build_engine, check_when_idle=_checks_when_idle(config))
    estimate = QueueEstimate.of(config.scheduler)
    return AsyncEngine(transport, observer, config.engine.step_timeout_s, estimate)


def engine_main(fd: int, build: BuildEngine = build_engine) -> int:
    """The child process of `ProcessTransport`: an engine at the other end of the socket `fd`. Returns the exit code."""
    live_as_child()
    stand_in(*_UNUSED)
    with socket.socket(fileno=fd) as connection:
        try:
            heartbeat = receive_heartbeat(connection)
            link = EngineLink(connection)
            config = msgspec.msgpack.decode(link.receive_bytes(), type=Config)
            with closing(logs.configure(config.observe, sys.stderr)):
                build_engine_here = partial(build, config, link.send)
                is_sound = engine_loop.run(
                    build_engine_here,
                    link,
                    link,
                    check_when_idle=_checks_when_idle(config),
                    heartbeat=heartbeat,
                    publishing=partial(publishing, config),
                )
                link.drain(_LAST_WORDS_TIMEOUT_S)
        except EOFError:
            return 0
    return 0 if is_sound else 70
