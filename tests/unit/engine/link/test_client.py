"""Timelines and streams: what the observers are told, when, and whose finish reason holds."""

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable

import pytest

from roseinfer.engine.link import client as client_module
from roseinfer.engine.link.client import MAX_TAKEN, AsyncEngine, Mailbox
from roseinfer.engine.link.heartbeat import Activity, Heartbeat
from roseinfer.engine.queue_estimate import MIN_STARTS
from roseinfer.errors import EngineDead, NotReady, SlowReader
from roseinfer.messages import Abort, Command, Event, IdleReport, Request, StepOutput, TokenLogprobs, TokenOutput
from roseinfer.records import (
    Advanced,
    EngineTimes,
    FinishReason,
    Invariant,
    Observer,
    RequestTimeline,
    StepRecord,
    Violation,
)
from tests.unit.engine.harness import make_engine, make_request, roomy_estimate


class ManualTransport:
    """An engine that steps when the test says so."""

    def __init__(self) -> None:
        self.engine = make_engine()
        self.commands: list[Command] = []
        self.heartbeat = Heartbeat()

    async def start(self, on_event: Callable[[Event], None], on_death: Callable[[str], None]) -> None:
        self.on_event, self.on_death = on_event, on_death
        on_event(self.engine.info)

    def send(self, command: Command) -> None:
        self.commands.append(command)

    def step(self) -> StepOutput:
        output = self.engine_step()
        self.on_event(output)
        return output

    def engine_step(self) -> StepOutput:
        """What the engine says then, before anybody has heard of it."""
        for command in self.commands:
            match command:
                case Request():
                    self.engine.add_request(command)
                case Abort(request_id):
                    self.engine.abort(request_id)
                case _:
                    raise AssertionError("not expected here")
        self.commands.clear()
        return self.engine.step()

    def kill(self) -> None:
        self.on_death("killed")

    async def close(self) -> None:
        self.on_death("never told: the client is closing")


class Told(Observer):
    """Everything the observer hears, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []

    def on_lifecycle(self, state: object) -> None:
        self.events.append(("lifecycle", state))

    def on_start(self, timeline: RequestTimeline) -> None:
        self.events.append(("start", timeline.request_id))

    def on_step(self, record: StepRecord, advanced: Advanced) -> None:
        assert all(timeline.token_ns[-1] == record.tokens_ns for timeline in advanced)
        self.events.append(("step", [timeline.request_id for timeline in advanced]))

    def on_finish(self, timeline: RequestTimeline) -> None:
        self.events.append(("finish", timeline.finish_reason))


@pytest.fixture
def transport() -> ManualTransport:
    return ManualTransport()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
async def client(transport: ManualTransport, told: Told) -> AsyncEngine:
    engine = AsyncEngine(transport, told, 30.0, roomy_estimate())
    with pytest.raises(NotReady):
        engine.info  # noqa: B018
    await engine.start(lambda _: None)
    return engine


def open_timeline(client: AsyncEngine, request_id: str = "a") -> RequestTimeline:
    timeline = RequestTimeline(request_id=request_id, recv_ns=time.monotonic_ns())
    client.open_timeline(timeline)
    return timeline


async def test_a_request_refused_before_the_engine_ends_at_once(client: AsyncEngine, told: Told) -> None:
    timeline = open_timeline(client)
    timeline.finish_reason = FinishReason.REJECTED
    client.close_timeline(timeline)
    assert told.events == [("start", "a"), ("finish", FinishReason.REJECTED)]


async def test_an_engine_that_is_started_again_has_no_step_under_way(
    client: AsyncEngine, transport: ManualTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts: list[None] = []
    monkeypatch.setattr(client.queue_estimate, "restart", lambda: restarts.append(None))
    transport.kill()
    assert restarts == []
    await client.start(lambda _: None)
    assert restarts == [None]


async def begin(
    client: AsyncEngine, transport: ManualTransport, max_tokens: int
) -> tuple[RequestTimeline, AsyncGenerator[list[TokenOutput], None], asyncio.Task[list[TokenOutput]]]:
    """Request "a" after one step, with its stream and the task that takes the first outputs."""
    timeline = open_timeline(client)
    stream = client.generate([make_request("a", max_tokens=max_tokens)], [timeline])
    task = start_taking(stream)
    await breathe()
    transport.step()
    return timeline, stream, task


async def test_the_end_is_reported_when_both_sides_have_ended(
    client: AsyncEngine, transport: ManualTransport, told: Told
) -> None:
    timeline, _, task = await begin(client, transport, max_tokens=2)
    transport.step()
    assert [out.finish_reason for out in await task] == [None, FinishReason.LENGTH]
    assert ("finish", FinishReason.LENGTH) not in told.events
    client.close_timeline(timeline)
    assert told.events == [("start", "a"), ("step", ["a"]), ("step", ["a"]), ("finish", FinishReason.LENGTH)]
    assert timeline.num_prompt_tokens == 3
    assert len(timeline.token_ns) == 2


async def test_tokens_made_before_an_abort_arrived_are_still_counted(
    client: AsyncEngine, transport: ManualTransport, told: Told
) -> None:
    timeline, stream, task = await begin(client, transport, max_tokens=50)
    await task
    await stream.aclose()
    late, transport.commands = transport.commands, []
    transport.step()  # the abort is still on its way
    timeline.finish_reason = FinishReason.STOP  # the server found a stop string: its reason holds
    client.close_timeline(timeline)
    assert told.events[-1] == ("step", ["a"])
    transport.commands = late
    transport.step()
    assert told.events[-2:] == [("step", []), ("finish", FinishReason.STOP)]
    assert len(timeline.token_ns) == 2


async def test_a_place_that_a_stop_string_freed_is_measured_and_one_that_a_client_left_is_not(
    client: AsyncEngine, transport: ManualTransport
) -> None:
    """The engine hears of both as an abort. A server whose answers end at stop strings must learn to refuse, too."""
    for reason, is_measured in ((FinishReason.ABORT, False), (FinishReason.STOP, True)):
        for _ in range(MIN_STARTS):
            timeline, stream, task = await begin(client, transport, max_tokens=50)
            await task
            timeline.finish_reason = reason
            await stream.aclose()
            transport.step()
            client.close_timeline(timeline)
        assert client.queue_estimate.is_measured is is_measured


async def test_death_ends_every_stream_after_what_was_already_due(
    client: AsyncEngine, transport: ManualTransport, told: Told
) -> None:
    timeline, stream, task = await begin(client, transport, max_tokens=50)
    transport.on_death("the engine process was killed by signal 9")
    assert len(await task) == 1
    with pytest.raises(EngineDead, match="signal 9"):
        await anext(stream)
    client.close_timeline(timeline)
    assert told.events[-1] == ("finish", FinishReason.ERROR)
    assert timeline.error_code == "engine_dead"
    assert client.trouble == "the engine process was killed by signal 9"
    assert client.num_unfinished == 0


async def test_what_an_engine_said_before_it_was_given_up_is_not_heard_after_it(
    client: AsyncEngine, transport: ManualTransport, told: Told
) -> None:
    """It may lie in the socket: of who ended there, and of who is forgotten altogether by now."""
    timelines = [open_timeline(client, name) for name in "ab"]
    streams = [client.generate([make_request(t.request_id, max_tokens=1)], [t]) for t in timelines]
    tasks = [start_taking(stream) for stream in streams]
    await breathe()
    with_the_ends = transport.engine_step()
    client.give_up("no engine step for 30 s")
    client.close_timeline(timelines[1])
    transport.on_event(with_the_ends)
    for task in tasks:
        with pytest.raises(EngineDead, match="no engine step"):
            await task
    client.close_timeline(timelines[0])
    assert told.events[2:] == [("finish", FinishReason.ERROR)] * 2
    assert (client.num_unfinished, client.queue_estimate.num_sequences, client.queue_estimate.num_tokens) == (0, 0, 0)


async def test_tokens_go_to_the_request_that_took_the_slot_last(
    client: AsyncEngine, transport: ManualTransport
) -> None:
    timelines = {name: open_timeline(client, name) for name in "ab"}
    streams = {name: client.generate([make_request(name)], [timelines[name]]) for name in "ab"}
    tasks = {name: start_taking(stream) for name, stream in streams.items()}
    await breathe()
    record = transport.engine.step().record
    times = EngineTimes(inbox_ns=1, scheduled_ns=1, num_cached_tokens=0, num_preemptions=0)

    def tell(*outputs: TokenOutput, **tokens: int) -> None:
        slots, token_ids = array("i", [3] * len(tokens)), array("i", tokens.values())
        transport.on_event(StepOutput(slots.tobytes(), token_ids.tobytes(), list(outputs), record))

    tell(TokenOutput("a", [10], times=times, slot=3))
    tell(slot_3=11)
    tell(TokenOutput("b", [20], times=times, slot=3))  # `a` was preempted
    tell(slot_3=21)
    tell(TokenOutput("a", [], None, FinishReason.ABORT, None, times))
    tell(slot_3=22)
    told = {name: [token for output in await task for token in output.token_ids] for name, task in tasks.items()}
    assert told == {"a": [10, 11], "b": [20, 21, 22]}
    for stream in streams.values():
        await stream.aclose()
    assert client.num_unfinished == 1


@pytest.mark.parametrize(
    ("story", "left"),
    [
        ("a in 3, b in 3, b ends, a ends", "a request that was preempted, and aborted after its successor had ended"),
        ("a in 3, a in 5, a ends", "a request that was preempted, and came back elsewhere"),
        ("a in 3, b in 3, a in 5, b ends, a ends", "both"),
        ("a in 3, b in 3, a in 3, b ends, a ends", "both, and the slot came back"),
    ],
)
async def test_nothing_is_remembered_of(client: AsyncEngine, transport: ManualTransport, story: str, left: str) -> None:
    timelines = [open_timeline(client, name) for name in "ab"]
    stream = client.generate([make_request(name) for name in "ab"], timelines)
    task = start_taking(stream)
    await breathe()
    record = transport.engine.step().record
    times = EngineTimes(inbox_ns=1, scheduled_ns=1, num_cached_tokens=0, num_preemptions=0)
    for words in (sentence.split() for sentence in story.split(", ")):
        output = (
            TokenOutput(words[0], [10], times=times, slot=int(words[2]))
            if words[1] == "in"
            else TokenOutput(words[0], [], None, FinishReason.ABORT, None, times)
        )
        transport.on_event(StepOutput(b"", b"", [output], record))
    assert client.trouble is None
    assert client._by_slot == {}, left
    await task
    await stream.aclose()


def start_taking(stream: AsyncGenerator[list[TokenOutput], None]) -> asyncio.Task[list[TokenOutput]]:
    """Begin to wait for the stream's next outputs, as a handler does."""

    async def take() -> list[TokenOutput]:
        return await anext(stream)

    return asyncio.create_task(take())


async def breathe() -> None:
    """Let every task that can run do so once."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_timelines_say_which_prompts_begin_alike(client: AsyncEngine) -> None:
    prompts = {"a": [1] * 16, "b": [1] * 8 + [2] * 9, "c": [2] * 7}
    timelines = {name: open_timeline(client, name) for name in prompts}
    streams = [client.generate([make_request(name, prompt)], [timelines[name]]) for name, prompt in prompts.items()]
    tasks = [start_taking(stream) for stream in streams]
    await breathe()
    first, second, third = [timelines[name].prefix_digests for name in prompts]
    assert (len(first), len(second), len(third)) == (16, 16, 0)
    assert first[:8] == second[:8]
    assert first[8:] != second[8:]
    for task in tasks:
        task.cancel()


async def test_an_engine_at_rest_and_a_front_end_that_waits_for_it_disagree(
    client: AsyncEngine, transport: ManualTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Violation] = []
    monkeypatch.setattr(client.observer, "on_rest", found.extend)
    timeline = open_timeline(client)
    stream = client.generate([make_request("a", max_tokens=2)], [timeline])
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    transport.on_event(IdleReport(0, []))
    assert not found, "the request is on its way"
    transport.commands.clear()  # and is lost
    transport.on_event(IdleReport(1, []))
    assert [violation.invariant for violation in found] == [Invariant.REQUESTS]
    transport.on_death("enough")
    with pytest.raises(EngineDead):
        await waiting
    await stream.aclose()


async def test_a_hung_engine_is_stuck_a_busy_collector_is_not_and_an_idle_one_never(
    client: AsyncEngine, transport: ManualTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = time.monotonic_ns()

    def after(seconds: float) -> Activity:
        monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns + int(seconds * 1e9))
        return client.account.activity

    transport.heartbeat.begin(Activity.STEPPING)
    assert after(1e6) is Activity.STEPPING, "no request waits for it"
    assert client.stalled_since_ns == 0
    after(0)
    stream = client.generate([make_request("a")], [open_timeline(client)])
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    for activity, limit_s in (
        (Activity.STEPPING, 30.0),
        (Activity.GC, 300.0),
        (Activity.CAPTURING, 300.0),
        (Activity.PROFILING, 300.0),
    ):
        after(0)
        transport.heartbeat.begin_collection() if activity is Activity.GC else transport.heartbeat.begin(activity)
        assert after(limit_s - 1) is activity
        assert client.stalled_since_ns == (now_ns if activity is Activity.STEPPING else 0), "a pause has its reason"
        assert client.trouble is None
        assert after(limit_s + 1) is Activity.STUCK
        assert client.trouble == "no engine step for 30 s with work in flight"
    monkeypatch.undo()
    transport.on_death("enough")
    with pytest.raises(EngineDead):
        await waiting
    await stream.aclose()


def token_output(number: int, num_logprobs: int | None = None) -> TokenOutput:
    scores = None if num_logprobs is None else [TokenLogprobs(-1.0, 1, [7] * num_logprobs, [-1.0] * num_logprobs)]
    return TokenOutput("a", [number], scores)


def numbers(outputs: list[TokenOutput]) -> list[int]:
    return [output.token_ids[0] for output in outputs]


async def test_all_that_came_is_taken_in_order_and_others_have_their_turn_between_lists() -> None:
    mailbox, num_turns = Mailbox(), 0
    for number in range(2 * MAX_TAKEN + 5):
        mailbox.put_output(token_output(number))

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    lists = [numbers(await mailbox.take_outputs()) for _ in range(3)]
    other.cancel()
    assert [len(taken) for taken in lists] == [MAX_TAKEN, MAX_TAKEN, 5]
    assert [number for taken in lists for number in taken] == [*range(2 * MAX_TAKEN + 5)]
    assert num_turns >= 2
    mailbox.put_output(token_output(1))
    assert numbers(await mailbox.take_outputs()) == [1]


async def test_a_reader_of_whole_answers_is_woken_by_an_end_or_by_many_outputs() -> None:
    mailbox = Mailbox(is_streamed=False)
    taking = asyncio.create_task(mailbox.take_outputs())
    for number in range(MAX_TAKEN - 1):
        mailbox.put_output(token_output(number))
        await asyncio.sleep(0)
    assert not taking.done()
    mailbox.put_output(token_output(MAX_TAKEN - 1))
    assert numbers(await taking) == [*range(MAX_TAKEN)]
    taking = asyncio.create_task(mailbox.take_outputs())
    mailbox.put_output(token_output(1))
    await asyncio.sleep(0)
    assert not taking.done()
    mailbox.put_output(TokenOutput("a", [2], None, FinishReason.LENGTH))
    assert numbers(await taking) == [1, 2]
    mailbox.put_output(token_output(3))
    mailbox.fail(EngineDead("gone"))
    assert numbers(await mailbox.take_outputs()) == [3]


async def test_an_error_comes_after_all_that_was_before_it() -> None:
    mailbox = Mailbox()
    for number in range(MAX_TAKEN + 1):
        mailbox.put_output(token_output(number))
    mailbox.fail(EngineDead("gone"))
    assert len(await mailbox.take_outputs()) == MAX_TAKEN
    assert numbers(await mailbox.take_outputs()) == [MAX_TAKEN]
    for _ in range(2):
        with pytest.raises(EngineDead):
            await mailbox.take_outputs()


@pytest.mark.parametrize(("num_logprobs", "size"), [(None, 1), (0, 2), (20, 22)])
async def test_what_waits_for_too_long_is_dropped_and_reported(
    monkeypatch: pytest.MonkeyPatch, num_logprobs: int | None, size: int
) -> None:
    monkeypatch.setattr(client_module, "MAX_WAITING", 100 * size)
    read, unread = Mailbox(), Mailbox()
    for number in range(400):
        read.put_output(token_output(number, num_logprobs))
        unread.put_output(token_output(number, num_logprobs))
        if number % 50 == 49:
            assert len(await read.take_outputs()) == 50
        assert len(unread._outputs) == (number + 1 if number < 100 else 0)
    with pytest.raises(SlowReader):
        await unread.take_outputs()


async def test_what_is_left_after_a_list_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_WAITING", MAX_TAKEN + 20)
    mailbox = Mailbox()
    for number in range(MAX_TAKEN + 15):
        mailbox.put_output(token_output(number))
    assert len(await mailbox.take_outputs()) == MAX_TAKEN
    for number in range(MAX_TAKEN + 5):
        mailbox.put_output(token_output(number))
    assert len(await mailbox.take_outputs()) == MAX_TAKEN
    assert len(await mailbox.take_outputs()) == 20
