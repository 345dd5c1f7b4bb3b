"""The loop: one message a step, commands in order, a failure told once, a full outbox respected."""

from collections.abc import Sequence

import pytest

from roseinfer.engine.core.engine import Engine
from roseinfer.engine.loop import run
from roseinfer.errors import ConfigError
from roseinfer.messages import Abort, Command, EngineFailure, EngineInfo, Event, IdleReport, Shutdown, StepOutput
from tests.unit.engine.harness import make_engine, make_request


class ScriptedInbox:
    """Hands out one batch of commands a call; end-of-file when there are none left."""

    def __init__(self, script: Sequence[list[Command]]) -> None:
        self.script = list(script)
        self.waits: list[bool] = []

    def receive(self, *, wait: bool, timeout_s: float | None = None) -> list[Command]:
        self.waits.append(wait)
        if not self.script:
            raise EOFError
        return self.script.pop(0)


class ListOutbox:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.depth = 3
        self.is_full = False

    def send(self, event: Event) -> None:
        self.events.append(event)


def test_one_message_a_step_and_it_sleeps_only_when_idle() -> None:
    inbox, outbox = ScriptedInbox([[], [make_request("a", max_tokens=2)], [], [], [Shutdown()]]), ListOutbox()
    assert run(make_engine, inbox, outbox, check_when_idle=True)
    assert inbox.waits == [True, True, False, True, True]
    assert [type(event) for event in outbox.events] == [EngineInfo, StepOutput, StepOutput, IdleReport]
    assert all(event.record.outbox_depth == 3 for event in outbox.events if isinstance(event, StepOutput))


def test_commands_that_arrive_together_are_taken_together() -> None:
    inbox = ScriptedInbox([[make_request("a"), make_request("b"), Abort("a")], []])
    outbox = ListOutbox()
    run(make_engine, inbox, outbox)
    first = outbox.events[1]
    assert isinstance(first, StepOutput)
    assert [output.request_id for output in first.outputs] == ["b", "a"]


def test_a_full_outbox_stops_the_stepping_and_sleeps() -> None:
    inbox, outbox = ScriptedInbox([[make_request("a")], [], []]), ListOutbox()
    outbox.is_full = True
    assert run(make_engine, inbox, outbox)  # the front end left: nothing is wrong with the engine
    assert [type(event) for event in outbox.events] == [EngineInfo]
    assert inbox.waits == [True] * 4


def test_the_record_says_how_long_the_engine_stood_still() -> None:
    class FullOnce(ListOutbox):
        def send(self, event: Event) -> None:
            super().send(event)
            self.is_full = len(self.events) == 2

    class Draining(ScriptedInbox):
        def receive(self, *, wait: bool, timeout_s: float | None = None) -> list[Command]:
            outbox.is_full = False  # the other side went on reading while we slept
            return super().receive(wait=wait, timeout_s=timeout_s)

    outbox, inbox = FullOnce(), Draining([[make_request("a")], [], [], []])
    run(make_engine, inbox, outbox)
    waits = [event.record.outbox_wait_ns > 0 for event in outbox.events if isinstance(event, StepOutput)]
    assert waits[:3] == [False, True, False]


def test_a_step_that_raises_is_told_once_and_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def broken(*_: object) -> None:
        raise ZeroDivisionError("by hand")

    monkeypatch.setattr(engine.runner, "launch", broken)
    inbox, outbox = ScriptedInbox([[make_request("a")], []]), ListOutbox()
    assert not run(lambda: engine, inbox, outbox)
    _, failure = outbox.events
    assert isinstance(failure, EngineFailure)
    assert failure.message == "ZeroDivisionError: by hand"
    assert "Traceback" in failure.traceback


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigError("no such file", param="model.path"), EngineFailure("no such file", "", True, "model.path")),
        (MemoryError("4 TiB"), "MemoryError: 4 TiB"),
        (ImportError("no torch here"), "ImportError: no torch here"),
    ],
)
def test_whatever_keeps_the_engine_from_being_built_is_told(error: Exception, told: object) -> None:
    def build() -> Engine:
        raise error

    outbox = ListOutbox()
    assert not run(build, ScriptedInbox([]), outbox)
    (failure,) = outbox.events
    assert isinstance(failure, EngineFailure)
    assert told in (failure, failure.message)
