"""The engine's only owner: has it built, takes commands from an inbox, steps, and sends one message a step."""

import gc
import traceback
from collections.abc import Callable
from typing import Protocol

from roseinfer.engine.core.engine import IDLE_OUTBOX, Engine, OutboxState
from roseinfer.engine.link.heartbeat import Pulse
from roseinfer.errors import ConfigError
from roseinfer.messages import Abort, Command, EngineFailure, Event, Profile, Request, Shutdown

REST_S = 1.0  # without work, before the invariants are checked: a request that comes meanwhile waits for that


class Inbox(Protocol):
    """Where commands come from."""

    def receive(self, *, wait: bool, timeout_s: float | None = None) -> list[Command]:
        """All commands that have arrived; with `wait`, sleep until there is one, the outbox has moved, or time is up.

        Raises EOFError when the other side has gone.
        """


class Outbox(Protocol):
    """Where events go. Sending never blocks."""

    @property
    def depth(self) -> int:
        """Messages that the other side's kernel buffer has not taken yet."""

    @property
    def is_full(self) -> bool:
        """The other side has stopped reading: make no more until it goes on."""

    def send(self, event: Event) -> None: ...


def run(
    build_engine: Callable[[], Engine],
    inbox: Inbox,
    outbox: Outbox,
    *,
    check_when_idle: bool = False,
    pulse: Pulse | None = None,
) -> bool:
    """Build an engine, announce it, and serve until Shutdown or end-of-file; returns whether it came to no harm.

    Whatever building or stepping raises is told once and ends the loop: after a failed step the state of the device is
    unknown.
    """
    try:
        engine = build_engine()
        engine.pulse = pulse or engine.pulse
        outbox.send(engine.info)
        gc.collect()
        # What start-up made lives for ever: later collections need not walk it. The collector itself stays on: steps
        # leave nothing behind that it tracks and make no cycles, so under load it has no reason to run.
        gc.freeze()
        with engine.gc_pauses:
            _serve(engine, inbox, outbox, check_when_idle=check_when_idle)
    except EOFError:
        return True
    except ConfigError as error:
        outbox.send(EngineFailure(error.message, is_config_error=True, param=error.param))
        return False
    except Exception as error:  # noqa: BLE001  # one of the three places that catch all
        outbox.send(EngineFailure(f"{type(error).__name__}: {error}", traceback.format_exc()))
        return False
    return True


def _serve(engine: Engine, inbox: Inbox, outbox: Outbox, *, check_when_idle: bool) -> None:
    stalled_ns = 0  # since when the outbox has been full with work to do; 0 while it is not
    while True:
        if outbox.is_full and engine.has_work:  # asked here because taking commands sleeps while it is full
            stalled_ns = stalled_ns or engine.phases.clock()
        if not _take_commands(engine, inbox, outbox, check_when_idle=check_when_idle):
            return
        if outbox.is_full or not engine.has_work:
            continue
        wait_ns = engine.phases.clock() - stalled_ns if stalled_ns else 0
        stalled_ns = 0
        depth = outbox.depth
        engine.pulse.begin_step()
        output = engine.step(OutboxState(depth, wait_ns) if depth or wait_ns else IDLE_OUTBOX)
        outbox.send(output)
        if engine.profile.is_active:
            engine.pulse.begin_profiling()  # this step may be the last: to write all takes longer than a step may
            if (ended := engine.profile.count(output.record)) is not None:
                outbox.send(ended)


def _take_commands(engine: Engine, inbox: Inbox, outbox: Outbox, *, check_when_idle: bool) -> bool:
    """Drain the inbox, sleeping on it when there is nothing else to do. False when told to leave."""
    if check_when_idle and not engine.has_work:
        engine.check_integrity()
    for command in _receive(engine, inbox, outbox):
        match command:
            case Request():
                engine.add(command)
            case Abort(request_id):
                engine.abort(request_id)
            case Profile():
                engine.pulse.begin_profiling()
                if (refusal := engine.profile.begin(command)) is not None:
                    outbox.send(refusal)
            case Shutdown():
                return False
    return True


def _receive(engine: Engine, inbox: Inbox, outbox: Outbox) -> list[Command]:
    """The commands that are there; with nothing to do those that come next, and a look around in a longer rest."""
    if engine.has_work and not outbox.is_full:
        return inbox.receive(wait=False)
    engine.pulse.rest()
    if engine.has_work or not engine.has_worked:
        return inbox.receive(wait=True)
    commands = inbox.receive(wait=True, timeout_s=REST_S)
    if not commands and not engine.has_work:
        outbox.send(engine.look_around())
    return commands
