"""The engine's loop: builds the engine, takes commands from an inbox, steps, and sends one message a step."""

import gc
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Protocol

from roseinfer.engine.core.engine import QUIET, Engine, LoopState, Profiler
from roseinfer.engine.invariants import assert_invariants, find_violations
from roseinfer.engine.link.heartbeat import Activity, Heartbeat
from roseinfer.errors import ConfigError
from roseinfer.messages import (
    Abort,
    Command,
    EngineFailure,
    Event,
    IdleReport,
    Profile,
    ProfileEnded,
    Request,
    Shutdown,
)
from roseinfer.records import StepRecord
from roseinfer.runtime.cpu_waits import CpuWaits, computing_threads
from roseinfer.runtime.gc_pauses import GcPauses

Publishing = Callable[[Engine], AbstractContextManager[Callable[[], None]]]

REST_S = 1.0  # without work, before the invariants are checked; a request that comes meanwhile waits for the check


class Inbox(Protocol):
    """Commands from the front end."""

    def receive(self, *, wait: bool, timeout_s: float | None = None) -> list[Command]:
        """All commands that have arrived; with `wait`, sleep until there is one, the outbox has moved, or time is up.

        Raises EOFError when the other side has gone.
        """


class Outbox(Protocol):
    """Events to the front end. Sending never blocks."""

    @property
    def depth(self) -> int:
        """Messages that the other side's kernel buffer has not taken yet."""

    @property
    def is_full(self) -> bool:
        """The other side has stopped reading: produce nothing until it reads again."""

    def send(self, event: Event) -> None: ...


def run(
    build_engine: Callable[[], Engine],
    inbox: Inbox,
    outbox: Outbox,
    *,
    check_when_idle: bool = False,
    heartbeat: Heartbeat | None = None,
    publishing: Publishing = lambda _: nullcontext(lambda: None),
) -> bool:
    """Build an engine, announce it, and serve until Shutdown or end-of-file; returns False if it failed.

    An error while building or stepping is sent once and ends the loop: after a failed step the state of the device is
    unknown. `publishing` opens what is called after each step.
    """
    try:
        engine, heartbeat = build_engine(), heartbeat or Heartbeat()
        with publishing(engine) as publish:
            _Loop(engine, inbox, outbox, heartbeat, publish, check_when_idle=check_when_idle).serve()
    except EOFError:
        return True
    except ConfigError as error:
        outbox.send(EngineFailure(error.message, is_config_error=True, param=error.param))
        return False
    except Exception as error:  # noqa: BLE001  # one of the three places that catch all
        outbox.send(EngineFailure(f"{type(error).__name__}: {error}", traceback.format_exc()))
        return False
    return True


def note_pauses(engine: Engine, heartbeat: Heartbeat) -> GcPauses:
    """Note garbage collections, while the result is open, and captures of CUDA graphs in the engine's heartbeat."""

    def begin_collection() -> None:
        engine.phases.begin_collection()
        heartbeat.begin_collection()

    def end_collection() -> None:
        heartbeat.end_collection()
        engine.phases.end_collection()

    def count(start_ns: int, end_ns: int) -> None:
        engine.gc_ns += end_ns - start_ns

    def note_capture(begins: bool) -> None:
        heartbeat.begin(Activity.CAPTURING if begins else Activity.STEPPING)

    engine.phases.on_capture = note_capture
    pauses = GcPauses(on_start=begin_collection, on_end=end_collection)
    pauses.listeners.append(count)
    return pauses


class StepProfile:
    """At most one profile at a time. A profiler that fails ends the profile and affects nothing else."""

    def __init__(self, profiler: Profiler | None) -> None:
        self._profiler = profiler
        self._wanted = Profile(0, "")
        self._num_left = 0
        self._has_stopped = False  # since the last step was marked

    @property
    def is_active(self) -> bool:
        return self._num_left > 0

    def begin(self, wanted: Profile) -> ProfileEnded | None:
        """Start the profiler; returns the answer if that fails."""
        if self._profiler is None:
            return ProfileEnded(0, "This engine has no profiler.")
        if self.is_active:
            return ProfileEnded(0, "A profile is being recorded already.")
        try:
            self._profiler.start()
        except (OSError, RuntimeError) as error:
            return ProfileEnded(0, f"{type(error).__name__}: {error}")
        self._wanted, self._num_left = wanted, wanted.num_steps
        return None

    def marks_step(self) -> bool:
        """Whether the profiler slows the next step to be output: by recording it, or by having stopped before it."""
        marks = self.is_active or self._has_stopped
        self._has_stopped = False
        return marks

    def count_step(self, record: StepRecord) -> ProfileEnded | None:
        """Count a recorded step; stops after the last one and returns the answer. Idle steps do not count."""
        self._num_left -= record.kind != "idle"
        if self.is_active:
            return None
        assert self._profiler is not None, "no profile begins without one"
        self._has_stopped = True
        try:
            self._profiler.stop(Path(self._wanted.directory))
        except (OSError, RuntimeError) as error:
            return ProfileEnded(self._wanted.num_steps, f"{type(error).__name__}: {error}")
        return ProfileEnded(self._wanted.num_steps)


class _Loop:
    """An engine between its inbox and its outbox."""

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        outbox: Outbox,
        heartbeat: Heartbeat,
        publish: Callable[[], None],
        *,
        check_when_idle: bool,
    ) -> None:
        self._engine, self._inbox, self._outbox, self._heartbeat = engine, inbox, outbox, heartbeat
        self._publish = publish
        self._check_when_idle = check_when_idle
        self._profile = StepProfile(engine.profiler)
        self._is_checked = True  # the invariants, since the last step

    def serve(self) -> None:
        """Announce the engine, and serve until Shutdown."""
        self._outbox.send(self._engine.info)
        gc.collect()
        # What start-up made lives for ever: later collections need not walk it. The collector itself stays on: steps
        # leave nothing behind that it tracks and make no cycles, so under load it has no reason to run.
        gc.freeze()
        with note_pauses(self._engine, self._heartbeat), closing(CpuWaits(computing_threads())) as waits:
            self._engine.look_for_waits = waits.look
            self._run()

    def _run(self) -> None:
        engine, outbox = self._engine, self._outbox
        stalled_ns = 0  # since when the outbox has been full with work to do; 0 while it is not
        while True:
            if outbox.is_full and engine.has_work:  # asked here because handling commands sleeps while it is full
                stalled_ns = stalled_ns or engine.phases.clock()
            if not self._handle_commands():
                return
            if outbox.is_full or not engine.has_work:
                continue
            self._step(engine.phases.clock() - stalled_ns if stalled_ns else 0)
            stalled_ns = 0

    def _step(self, wait_ns: int) -> None:
        depth, is_profiled = self._outbox.depth, self._profile.marks_step()
        self._heartbeat.begin(Activity.STEPPING)
        self._is_checked = False
        output = self._engine.step(LoopState(depth, wait_ns, is_profiled) if depth or wait_ns or is_profiled else QUIET)
        self._outbox.send(output)
        self._publish()
        if self._profile.is_active:
            self._heartbeat.begin(Activity.PROFILING)  # writing the trace takes longer than a step may
            if (ended := self._profile.count_step(output.record)) is not None:
                self._outbox.send(ended)

    def _handle_commands(self) -> bool:
        """Handle all commands that have arrived, sleeping when there is no work. Returns False after Shutdown."""
        engine = self._engine
        if self._check_when_idle and not engine.has_work:
            assert_invariants(engine.scheduler)
        for command in self._receive():
            match command:
                case Request():
                    engine.add_request(command)
                case Abort(request_id):
                    engine.abort(request_id)
                case Profile():
                    self._heartbeat.begin(Activity.PROFILING)
                    if (refusal := self._profile.begin(command)) is not None:
                        self._outbox.send(refusal)
                case Shutdown():
                    return False
        return True

    def _receive(self) -> list[Command]:
        """Drain the inbox; blocks when idle, and checks invariants after a second."""
        engine = self._engine
        if engine.has_work and not self._outbox.is_full:
            return self._inbox.receive(wait=False)
        self._heartbeat.begin(Activity.IDLE)
        if engine.has_work or self._is_checked:
            return self._inbox.receive(wait=True)
        commands = self._inbox.receive(wait=True, timeout_s=REST_S)
        if not commands:
            self._is_checked = True
            self._outbox.send(IdleReport(engine.scheduler.num_added, find_violations(engine.scheduler)))
        return commands
