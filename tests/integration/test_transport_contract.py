"""One set of promises, held by both transports: order, one end for each request, a death that is told."""

import asyncio
import errno
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from roseinfer.config.options import Config, ModelConfig
from roseinfer.engine.link import transport as transport_module
from roseinfer.engine.link.client import AsyncEngine
from roseinfer.engine.link.transport import ProcessTransport, ThreadTransport, Transport
from roseinfer.errors import ConfigError, Conflict, EngineDead, EngineFailed
from roseinfer.messages import Grammar, ProfileEnded, TokenOutput
from roseinfer.records import Advanced, FinishReason, Observer, RequestTimeline, StepRecord
from roseinfer.runtime import child_process
from tests.integration.fake_engine import build_fake_engine
from tests.unit.engine.harness import make_request, roomy_estimate, run_alone

StartEngine = Callable[..., Awaitable[AsyncEngine]]


class Facts(Observer):
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.started: list[RequestTimeline] = []
        self.finished: list[RequestTimeline] = []
        self.records: list[StepRecord] = []
        self.num_tokens = 0

    def on_lifecycle(self, state: object) -> None: ...

    def on_start(self, timeline: RequestTimeline) -> None:
        self.started.append(timeline)

    def on_step(self, record: StepRecord, advanced: Advanced) -> None:
        self.records.append(record)
        self.num_tokens += len(advanced)

    def on_finish(self, timeline: RequestTimeline) -> None:
        self.finished.append(timeline)


def make_transport(kind: str, model: str) -> Transport:
    config = Config(model=ModelConfig(path=model))
    if kind == "thread":
        return ThreadTransport(config, build_fake_engine, check_when_idle=True)
    return ProcessTransport(config, command=("-m", "tests.integration.fake_engine"))


@pytest.fixture
def facts() -> Facts:
    return Facts()


@pytest.fixture(params=["thread", "process"])
async def start_engine(request: pytest.FixtureRequest, facts: Facts) -> AsyncIterator[StartEngine]:
    engines: list[AsyncEngine] = []

    async def start(model: str, on_progress: Callable[[object], None] = lambda _: None) -> AsyncEngine:
        engine = AsyncEngine(make_transport(request.param, model), facts, 30.0, roomy_estimate())
        engines.append(engine)
        await engine.start(on_progress)
        return engine

    yield start
    for engine in engines:
        await engine.close()


def open_timeline(engine: AsyncEngine, request_id: str) -> RequestTimeline:
    timeline = RequestTimeline(request_id=request_id, recv_ns=time.monotonic_ns())
    engine.open_timeline(timeline)
    return timeline


async def collect(
    engine: AsyncEngine, request_id: str, *, max_tokens: int = 6, grammar: Grammar | None = None
) -> list[TokenOutput]:
    request = make_request(request_id, range(1, 20), max_tokens=max_tokens, grammar=grammar)
    timeline = open_timeline(engine, request_id)
    try:
        return [out async for outputs in engine.generate([request], [timeline]) for out in outputs]
    finally:
        timeline.end_ns = time.monotonic_ns()
        engine.close_timeline(timeline)


async def test_many_streams_get_their_own_tokens_in_order(start_engine: StartEngine, facts: Facts) -> None:
    engine = await start_engine("fake")
    results = await asyncio.gather(*(collect(engine, f"r{i}") for i in range(40)))
    expected = run_alone(make_request("x", range(1, 20), max_tokens=6))
    for outputs in results:
        assert [token for out in outputs for token in out.token_ids] == expected
        assert [out.finish_reason for out in outputs] == [None] * 5 + [FinishReason.LENGTH]
    assert len(facts.started) == len(facts.finished) == 40
    assert facts.num_tokens == 240 == sum(len(t.token_ns) for t in facts.finished)
    assert [record.step_id for record in facts.records] == list(range(1, len(facts.records) + 1))
    assert engine.num_unfinished == 0


async def test_stamps_of_both_sides_are_one_clock(start_engine: StartEngine, facts: Facts) -> None:
    engine = await start_engine("fake")
    await collect(engine, "a")
    (timeline,) = facts.finished
    stamps = [timeline.recv_ns, timeline.inbox_ns, timeline.scheduled_ns, *timeline.token_ns, timeline.end_ns]
    assert stamps == sorted(stamps)


async def test_leaving_a_stream_aborts_it(start_engine: StartEngine, facts: Facts) -> None:
    engine = await start_engine("fake")
    timeline = open_timeline(engine, "a")
    stream = engine.generate([make_request("a", max_tokens=400)], [timeline])
    await anext(stream)
    await stream.aclose()
    engine.close_timeline(timeline)
    await until(lambda: engine.num_unfinished == 0)
    assert len(timeline.token_ns) < 400
    assert facts.finished == [timeline]
    assert facts.records[-1].num_used_blocks == 0


async def test_several_requests_share_one_stream(start_engine: StartEngine) -> None:
    engine = await start_engine("fake")
    requests = [make_request(f"n{i}", [5, 6, 7 + i], max_tokens=3 + i) for i in range(3)]
    timelines = [open_timeline(engine, request.request_id) for request in requests]
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    async for outputs in engine.generate(requests, timelines):
        for out in outputs:
            tokens[out.request_id] += out.token_ids
    assert tokens == {request.request_id: run_alone(request) for request in requests}


async def test_a_profile_goes_there_and_its_end_comes_back(
    start_engine: StartEngine, facts: Facts, tmp_path: Path
) -> None:
    engine = await start_engine("fake")
    ended = engine.profile(3, str(tmp_path / "new"))
    with pytest.raises(Conflict):
        engine.profile(1, "elsewhere")
    await collect(engine, "a")
    assert await ended == ProfileEnded(3)
    assert (tmp_path / "new" / "trace.json").exists()
    assert [record.is_profiled for record in facts.records[:5]] == [True, True, True, True, False]
    refused = engine.profile(3, str(tmp_path / "new"))
    await collect(engine, "b")
    assert "FileExistsError" in (await refused).error


async def test_a_profile_ends_with_its_engine(start_engine: StartEngine) -> None:
    engine = await start_engine("fails")
    ended = engine.profile(50, "nowhere")
    with pytest.raises(EngineFailed):
        await collect(engine, "a")
    assert (await ended).error == "The engine failed."
    with pytest.raises(EngineDead):
        engine.profile(1, "nowhere")


async def test_a_failing_step_ends_every_stream_with_an_error(start_engine: StartEngine, facts: Facts) -> None:
    engine = await start_engine("fails")
    results = await asyncio.gather(*(collect(engine, f"r{i}", max_tokens=50) for i in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [EngineFailed] * 3
    assert "on fire" not in str(results[0])  # the engine's own words are for the log
    error = await engine.wait_dead()
    assert any("on fire" in note for note in error.__notes__)
    assert engine.trouble == "The engine failed."
    assert {t.finish_reason for t in facts.finished} == {FinishReason.ERROR}
    with pytest.raises(EngineDead):
        await collect(engine, "late")


async def test_choices_that_fail_together_are_one_prompts_fault(start_engine: StartEngine) -> None:
    """That they are of one prompt is known in the engine by its list, which goes over once."""
    engine = await start_engine("poisoned")
    prompt = [5, 6, 7]
    requests = [replace(make_request(f"bad{i}", seed=i), prompt_token_ids=prompt) for i in range(6)]
    timelines = [open_timeline(engine, request.request_id) for request in requests]
    ended = [out.finish_reason async for outputs in engine.generate(requests, timelines) for out in outputs]
    assert ended == [FinishReason.ERROR] * 6, "in one step or in six"
    assert len(await collect(engine, "good")) == 6


async def test_a_value_the_user_gave_fails_the_start(start_engine: StartEngine) -> None:
    with pytest.raises(ConfigError, match="no such model") as caught:
        await start_engine("bad")
    assert caught.value.param == "model.path"


async def test_a_mistake_in_handling_an_event_ends_the_start_and_is_not_swallowed(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context.get("exception")))

    def broken(_: object) -> None:
        raise ZeroDivisionError("by hand")

    with pytest.raises(EngineFailed, match="could not be handled"):
        async with asyncio.timeout(60):
            await start_engine("fake", broken)
    await until(lambda: any(isinstance(error, ZeroDivisionError) for error in told))


async def test_closing_ends_open_streams(start_engine: StartEngine) -> None:
    engine = await start_engine("fake")
    task = asyncio.create_task(collect(engine, "a", max_tokens=450))
    await until(lambda: engine.num_unfinished == 1)
    await engine.close()
    with pytest.raises(EngineDead):
        await task
    await engine.close()


async def start_process(facts: Facts) -> tuple[AsyncEngine, int]:
    transport = ProcessTransport(Config(), command=("-m", "tests.integration.fake_engine"))
    engine = AsyncEngine(transport, facts, 0.3, roomy_estimate())
    await engine.start(lambda _: None)
    assert transport.pid is not None
    return engine, transport.pid


async def test_a_killed_engine_process_is_noticed_and_every_stream_ends(facts: Facts) -> None:
    engine, pid = await start_process(facts)
    tasks = [asyncio.create_task(collect(engine, f"r{i}", max_tokens=450)) for i in range(4)]
    await until(lambda: bool(facts.records))
    os.kill(pid, signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30.0)
    assert [type(result) for result in results] == [EngineDead] * 4
    assert "signal 9" in str(engine.trouble)
    await engine.close()


@pytest.mark.parametrize(
    "error", [OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), RuntimeError("can't start new thread")]
)
async def test_a_process_that_the_system_does_not_start_is_an_engine_that_cannot_be_started(
    error: Exception, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(transport_module, "start_process", refuse)
    engine = AsyncEngine(make_transport("process", "normal"), facts, 30.0, roomy_estimate())
    with pytest.raises(EngineDead, match=f"cannot be started: .*{error.args[-1]}"):
        await engine.start(lambda _: None)
    await engine.close()


async def test_a_process_that_has_ended_before_it_gets_anything_is_a_dead_engine(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_and_wait(*_: object, **options: Any) -> "subprocess.Popen[bytes]":
        started = child_process.start_process(["-c", "raise SystemExit(3)"], **options)
        started.wait()
        return started

    monkeypatch.setattr(transport_module, "start_process", start_and_wait)
    engine = AsyncEngine(make_transport("process", "normal"), facts, 30.0, roomy_estimate())
    with pytest.raises(EngineDead, match="exited with code 3"):
        await engine.start(lambda _: None)
    await engine.close()


async def test_a_grammar_that_was_sent_once_is_that_of_every_sequence_also_of_an_engine_started_again(
    start_engine: StartEngine,
) -> None:
    """The fake engine has none, so that a sequence with a grammar fails; one that has lost it would get tokens."""
    engine, grammar = await start_engine("fake"), Grammar("regex", "a+")
    assert len(await collect(engine, "free")) == 6
    for _ in range(2):
        for request_id in ("first", "second"):
            [output] = await collect(engine, request_id, grammar=grammar)
            assert output.finish_reason is FinishReason.ERROR
        engine.give_up("for a test")
        await engine.start(lambda _: None)


async def test_a_stopped_engine_process_is_trouble_only_while_there_is_work(facts: Facts) -> None:
    engine, pid = await start_process(facts)
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(0.4)
        assert not engine.trouble
        task = asyncio.create_task(collect(engine, "a"))
        await until(lambda: engine.trouble is not None)
        assert "no engine step" in str(engine.trouble)
    finally:
        os.kill(pid, signal.SIGCONT)
    await task
    assert not engine.trouble
    await engine.close()


async def test_a_signal_to_the_whole_service_leaves_the_engine_to_the_front_end(facts: Facts) -> None:
    engine, pid = await start_process(facts)
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    assert len(await collect(engine, "a")) == 6
    await engine.close()


async def test_the_engine_process_has_a_session_of_its_own(facts: Facts) -> None:
    engine, pid = await start_process(facts)
    assert os.getsid(pid) == pid != os.getsid(0)
    await engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait until the condition holds; fails after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # the condition is somebody else's state, there is no event to await
            await asyncio.sleep(0.005)
