"""A breach leaves a directory that says what happened around it."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from roseinfer.config.options import Config, ModelConfig, ObserveConfig
from roseinfer.errors import ConfigError, Conflict
from roseinfer.messages import ProfileEnded
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.recorder.capture import BreachCapture
from roseinfer.observe.recorder.capture_files import write_profile_manifest
from roseinfer.observe.recorder.recorder import FlightRecorder
from roseinfer.observe.recorder.recording import Recording
from roseinfer.records import Advanced, Arrival, Delivery, RequestTimeline
from tests.unit.observe.facts import make_step, make_timeline, writes_of

MS, S = 1_000_000, 1_000_000_000


class StepRecorder(FlightRecorder):
    """Remembers so many of the newest steps."""

    def __init__(self, size: int) -> None:
        super().__init__(Config(observe=ObserveConfig(recorder_steps=size)), "1.2.3")

    def step(self, step_id: int) -> None:
        self.on_step(make_step(step_id=step_id), Advanced())


class World:
    """A capture over a clock of its own: streams write, time passes, and the waiting after a breach is a switch."""

    def __init__(
        self, parent: Path, *rules: str, profile: Any = None, model: str = "m", cooldown_s: float = 60, **settings: Any
    ) -> None:
        self.parent = parent
        self.now_ns = 1000 * S
        self.recorder = StepRecorder(settings.pop("size", 100))
        self.after = asyncio.Event()
        self.capture = BreachCapture(
            Config(
                model=ModelConfig(path=model),
                observe=ObserveConfig(capture_rules=rules, capture_dir=str(parent), **settings),
            ),
            "1.2.3",
            self.recorder,
            clock=lambda: self.now_ns,
            sleep=self._sleep,
            cooldown_s=cooldown_s,
        )
        self.capture.profile = self._begin_profile
        self._profile = profile or self._no_profile
        self._num_steps = 0

    async def _begin_profile(self, num_steps: int, directory: str) -> Awaitable[ProfileEnded]:
        return self._profile(num_steps, directory)

    async def _no_profile(self, num_steps: int, directory: str) -> ProfileEnded:
        raise AssertionError("nobody asked for a profile")

    async def _sleep(self, _: float) -> None:
        await self.after.wait()

    def gap(self, duration_ms: float, request_id: str = "r-1", **changes: Any) -> None:
        """One stream writes, so long after its last write."""
        self._num_steps += 1
        self.recorder.step(self._num_steps)
        self.now_ns += int(duration_ms * MS)
        timeline = make_timeline(
            request_id=request_id, write_ns=[self.now_ns - int(duration_ms * MS), self.now_ns], **changes
        )
        delivery = Delivery(Arrival(0, 0, 0), 0, 0, self.now_ns, False, len(timeline.write_ns) - 1)
        self.capture.on_writes(writes_of((timeline, delivery)))

    async def settle(self) -> list[Path]:
        """Let the capture under way end; all captures that there are."""
        self.after.set()
        if tasks := captures_under_way():
            await asyncio.wait(tasks)
        self.after.clear()
        return sorted(self.parent.iterdir()) if self.parent.exists() else []


def captures_under_way() -> set["asyncio.Task[Any]"]:
    return {task for task in asyncio.all_tasks() if task.get_name() == "capture"}


def manifest(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
    return content


async def test_a_stall_is_captured_once_with_what_came_before(tmp_path: Path) -> None:
    world = World(tmp_path / "captures", "2 gaps over 60 ms in 10 s")
    for _ in range(5):
        world.gap(10)
    world.gap(70, "slow-1", trace_id="ab" * 16)
    world.gap(80, "slow-2")
    await asyncio.sleep(0)
    for _ in range(3):
        world.gap(90, "after")
    [directory] = await world.settle()
    recording = Recording.load(directory / "recording.npz")
    assert recording.steps["step_id"].tolist() == list(range(1, 11)), "before, the stall, and after"
    told = manifest(directory)
    assert told["rule"] == "2 gaps over 60 ms in 10 s"
    assert told["requests"] == [
        {"request_id": "slow-1", "trace_id": "ab" * 16},
        {"request_id": "slow-2", "trace_id": ""},
    ]
    assert told["profile"] is None


async def test_what_the_ring_forgets_while_it_waits_is_not_lost(tmp_path: Path) -> None:
    world = World(tmp_path, "1 gap over 60 ms in 10 s", size=16)
    for _ in range(15):
        world.gap(10)
    world.gap(70)
    for _ in range(18):
        world.gap(10)
    [directory] = await world.settle()
    steps = Recording.load(directory / "recording.npz").steps["step_id"].tolist()
    assert steps == [*range(1, 17), *range(19, 35)]


async def test_a_clean_run_leaves_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, "3 gaps over 60 ms in 10 s", "1 ttft over 2 s in 30 s", "1 slow gap of gc in 60 s")
    for _ in range(100):
        world.gap(59)
    world.gap(61)
    world.gap(61)
    world.capture.on_slow_gap(Gap(0, 1, 0, 5, 1, {Cause.DECODE: 5}, Cause.DECODE, True), make_timeline())
    assert await world.settle() == []


async def test_it_rests_after_a_capture(tmp_path: Path) -> None:
    world = World(tmp_path, "1 gap over 60 ms in 10 s")
    world.gap(70)
    assert len(await world.settle()) == 1
    world.now_ns += 59 * S
    world.gap(70)
    assert len(await world.settle()) == 1
    world.now_ns += 1 * S
    world.gap(70)
    assert len(await world.settle()) == 2


async def test_what_broke_a_rule_once_does_not_break_it_again(tmp_path: Path) -> None:
    world = World(tmp_path, "2 gaps over 60 ms in 1000 s", cooldown_s=0)
    world.gap(70)
    world.gap(70)
    assert len(await world.settle()) == 1
    world.gap(70)
    assert len(await world.settle()) == 1


async def test_the_oldest_captures_make_room(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine").write_bytes(os.urandom(100_000))
    world = World(
        tmp_path,
        "1 gap over 60 ms in 10 s",
        model="m" * 10_000,
        cooldown_s=0,
        capture_max_mib=0.06,
    )
    names: list[Path] = []
    for _ in range(6):
        world.gap(70)
        names += [path for path in await world.settle() if path not in names and path.name != "notes"]
    left = [path for path in names if path.exists()]
    assert (tmp_path / "notes" / "mine").exists()
    assert len(names) == 6
    assert left == names[-len(left) :]
    assert len(left) == 2
    assert sum(file.stat().st_size for path in left for file in path.iterdir()) <= 0.06 * (1 << 20)


async def test_the_manifest_of_a_profile_by_hand_has_the_keys_of_a_breach(tmp_path: Path) -> None:
    world = World(tmp_path, "1 gap over 60 ms in 10 s")
    world.gap(70)
    [directory] = await world.settle()
    breach = manifest(directory)
    write_profile_manifest(world.capture.facts, tmp_path, 20)
    by_hand = manifest(tmp_path)
    assert by_hand.keys() == breach.keys()
    assert by_hand["profile"] == {"num_steps": 20, "trace": "trace.json"}
    assert by_hand["versions"] == breach["versions"]
    assert by_hand["rule"] is None


async def test_the_newest_capture_is_never_deleted(tmp_path: Path) -> None:
    world = World(tmp_path, "1 gap over 60 ms in 10 s", cooldown_s=0, capture_max_mib=1e-6)
    for _ in range(2):
        world.gap(70)
        [directory] = await world.settle()
        assert manifest(directory)["rule"]


def written_first(timeline: RequestTimeline) -> Delivery:
    return Delivery(Arrival(0, 0, 0), 0, 0, timeline.write_ns[0], False, 0)


def finish_late(world: World) -> RequestTimeline:
    return make_timeline(recv_ns=world.now_ns, token_ns=[world.now_ns + 3 * S], write_ns=[world.now_ns + 3 * S])


@pytest.mark.parametrize(
    "breach",
    [
        lambda world: world.capture.on_writes(writes_of((late := finish_late(world), written_first(late)))),
        lambda world: world.capture.on_step(make_step(tokens_ns=4 * S), Advanced.newest([_unstreamed([S, 4 * S])])),
        lambda world: world.capture.on_slow_gap(Gap(0, 1, 0, 5, 1, {Cause.GC: 5}, Cause.GC, True), make_timeline()),
    ],
)
async def test_each_kind_of_rule(tmp_path: Path, breach: Callable[[World], None]) -> None:
    world = World(
        tmp_path, "1 ttft over 2 s in 30 s", "1 gap over 2 s in 30 s", "1 slow gap of gc in 30 s", cooldown_s=0
    )
    breach(world)
    assert len(await world.settle()) == 1


def _unstreamed(token_ns: list[int]) -> RequestTimeline:
    return make_timeline(is_streamed=False, token_ns=token_ns, write_ns=[])


def test_rules_without_a_directory_are_refused(tmp_path: Path) -> None:
    world = World(tmp_path, "1 gap over 60 ms in 10 s")
    config = Config(observe=ObserveConfig(capture_rules=("1 gap over 60 ms in 10 s",)))
    with pytest.raises(ConfigError, match=r"observe\.capture_dir") as refusal:
        BreachCapture(config, "1.2.3", world.recorder)
    assert refusal.value.param == "observe.capture_rules"


def test_without_rules_nothing_need_be_given(tmp_path: Path) -> None:
    world = World(tmp_path, "1 gap over 60 ms in 10 s")
    assert BreachCapture(Config(), "1.2.3", world.recorder).observers == []
    assert world.capture.observers == [world.capture]


def write_trace(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "trace.json").write_text("{}")


async def test_the_next_steps_are_profiled(tmp_path: Path) -> None:
    async def profile(num_steps: int, directory: str) -> ProfileEnded:
        write_trace(Path(directory))
        return ProfileEnded(num_steps)

    world = World(tmp_path, "1 gap over 60 ms in 10 s", profile=profile, capture_profile_steps=7)
    world.gap(70)
    [directory] = await world.settle()
    assert manifest(directory)["profile"] == {"num_steps": 7, "trace": "trace.json"}
    assert sorted(path.name for path in directory.iterdir()) == ["manifest.json", "recording.npz", "trace.json"]


async def test_a_profile_that_cannot_be_is_noted(tmp_path: Path) -> None:
    async def refuse(num_steps: int, directory: str) -> ProfileEnded:
        raise Conflict("One is running.")

    world = World(tmp_path, "1 gap over 60 ms in 10 s", profile=refuse, capture_profile_steps=7)
    world.gap(70)
    [directory] = await world.settle()
    assert manifest(directory)["profile"] == {"error": "One is running."}


async def test_a_disk_that_refuses_costs_the_capture_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("a file where the directory should go")
    world = World(tmp_path / "taken", "1 gap over 60 ms in 10 s", cooldown_s=0)
    world.gap(70)
    world.after.set()
    await asyncio.wait(captures_under_way())
    assert "could not be written" in caplog.text
    world.gap(70)
    assert captures_under_way(), "it watches on"
    await asyncio.wait(captures_under_way())
