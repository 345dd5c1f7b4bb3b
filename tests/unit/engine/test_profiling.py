"""A profile covers the steps that were asked for, is told once, and never costs a request."""

from pathlib import Path
from typing import Any

import pytest

from roseinfer.engine.core.batch import Launched, ScheduledBatch, Watch
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.link.heartbeat import Activity, Heartbeat
from roseinfer.engine.loop import run
from roseinfer.messages import Command, Event, IdleReport, Profile, ProfileEnded, StepOutput
from tests.unit.engine.harness import make_engine, make_request
from tests.unit.engine.test_loop import ListOutbox, ScriptedInbox


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
def test_so_many_steps_are_profiled_and_the_next_is_marked_for_the_stopping(pipeline_depth: int) -> None:
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
