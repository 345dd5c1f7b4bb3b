"""The loop: one message a step, commands in order, a failure told once, a full outbox respected."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from roseinfer.engine.core.batch import Launched, ScheduledBatch, Watch
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.link.heartbeat import Activity, Heartbeat
from roseinfer.engine.loop import run
from roseinfer.errors import ConfigError
from roseinfer.messages import (
    Abort,
    Command,
    EngineFailure,
    EngineInfo,
    Event,
    IdleReport,
    Profile,
    ProfileEnded,
    Shutdown,
    StepOutput,
)
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


def test_a_step_that_raises_is_reported_once_and_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_whatever_keeps_the_engine_from_being_built_is_reported(error: Exception, told: object) -> None:
    def build() -> Engine:
        raise error

    outbox = ListOutbox()
    assert not run(build, ScriptedInbox([]), outbox)
    (failure,) = outbox.events
    assert isinstance(failure, EngineFailure)
    assert told in (failure, failure.message)


class FakeProfiler:
    """Remembers what it was told; `fails` names the call that raises."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self.heartbeat: Heartbeat | None = None  # of the engine, if what it says meanwhile is asked for
        self.activities: list[Activity] = []
        self._fails = fails

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.heartbeat is not None:
            self.activities.append(self.heartbeat.read().activity)
        if name == self._fails:
            raise OSError(28, "No space left on device")

    def start(self) -> None:
        self._call("start")

    def stop(self, directory: Path) -> None:
        self._call("stop")
        assert directory == Path("traces")


def serve(profiler: FakeProfiler | None, *script: list[Command], **engine: Any) -> list[Event]:
    """What the loop sends, without the engine's announcement, until the script is over and all work is done."""
    outbox, made = ListOutbox(), _engine(profiler, **engine)
    run(lambda: made, ScriptedInbox([*script, *([[]] * 20)]), outbox)
    return outbox.events[1:]


def _engine(profiler: FakeProfiler | None, **engine: Any) -> Engine:
    made = make_engine(**engine)
    made.profiler = profiler
    return made


def profiled(events: list[Event]) -> list[bool]:
    return [event.record.is_profiled for event in events if isinstance(event, StepOutput)]


def ended(events: list[Event]) -> list[ProfileEnded]:
    return [event for event in events if isinstance(event, ProfileEnded)]


@pytest.mark.parametrize("pipeline_depth", [0, 1])
def test_the_asked_number_of_steps_is_profiled_and_the_next_is_marked_for_the_stop(pipeline_depth: int) -> None:
    profiler = FakeProfiler()
    events = serve(
        profiler,
        [make_request("a", max_tokens=8)],
        [Profile(3, "traces")],
        pipeline_depth=pipeline_depth,
    )
    assert profiled(events)[:6] == [False, True, True, True, True, False]
    assert profiler.calls == ["start", "stop"]
    assert ended(events) == [ProfileEnded(3)]
    assert events.index(ProfileEnded(3)) == 4, "told right after the last of its steps"


def test_a_profile_waits_for_work() -> None:
    profiler = FakeProfiler()
    events = serve(profiler, [Profile(2, "traces")], [], [make_request("a", max_tokens=4)])
    assert profiled(events)[:4] == [True, True, True, False]
    assert ended(events) == [ProfileEnded(2)]


def test_a_second_profile_is_refused_and_the_first_goes_on() -> None:
    events = serve(FakeProfiler(), [make_request("a", max_tokens=6)], [Profile(3, "traces")], [Profile(1, "traces")])
    refusal, end = ended(events)
    assert "already" in refusal.error
    assert end == ProfileEnded(3)


def test_an_engine_without_a_profiler_says_so() -> None:
    [refusal] = ended(serve(None, [Profile(3, "traces")]))
    assert refusal.error == "This engine has no profiler."


def test_the_engine_says_that_it_profiles_while_it_starts_and_writes() -> None:
    """The trace of many steps takes longer to write than a step may take."""
    profiler, engine, heartbeat = FakeProfiler(), make_engine(), Heartbeat()
    engine.profiler, profiler.heartbeat = profiler, heartbeat
    launch, launched_in = engine.runner.launch, []

    def launch_noting(batch: ScheduledBatch, watch: Watch) -> Launched:
        launched_in.append(heartbeat.read().activity)
        return launch(batch, watch)

    engine.runner.launch = launch_noting  # type: ignore[method-assign]
    inbox = ScriptedInbox([[make_request("a", max_tokens=6)], [Profile(2, "traces")], *([[]] * 8)])
    run(lambda: engine, inbox, ListOutbox(), heartbeat=heartbeat)
    assert profiler.activities == [Activity.PROFILING] * 2
    assert launched_in == [Activity.STEPPING] * 6
    assert heartbeat.read().activity is Activity.IDLE


@pytest.mark.parametrize(("fails", "num_marked"), [("start", 0), ("stop", 3)])
def test_a_profiler_that_fails_costs_the_profile_alone(fails: str, num_marked: int) -> None:
    events = serve(FakeProfiler(fails), [make_request("a", max_tokens=6), Profile(2, "traces")])
    assert [end.error for end in ended(events)] == ["OSError: [Errno 28] No space left on device"]
    assert sum(profiled(events)) == num_marked
    assert len(profiled(events)) == 6
    assert all(isinstance(event, StepOutput | ProfileEnded | IdleReport) for event in events)
