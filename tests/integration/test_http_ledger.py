"""The ledger that a client asks for: its parts add up for every ending, and agree with what else is told."""

import asyncio
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from aiohttp import ClientResponse
from prometheus_client.parser import text_string_to_metric_families

from roseinfer.engine.core.engine import Engine
from roseinfer.errors import EngineDead
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import Clock, Gap, gaps_of
from roseinfer.observe.recorder.recording import Recording
from roseinfer.records import FinishReason, RequestTimeline
from roseinfer.server import middleware
from tests.integration.faults import on_a_calm_machine
from tests.integration.live_server import LiveServer, live
from tests.unit.engine.harness import make_engine
from tests.unit.server.harness import INSTRUMENTS, ScriptedEngine, serving

ASKED = {"x-roseinfer-ledger": "1"}
FIRST_PARTS = ["receive", "tokenize", "submit_lag", "queue_wait", "prefill"]
LAST_PARTS = {"engine_outbox", "delivery", "cut_short"}


def build(latency_s: float = 0.002) -> Engine:
    engine = make_engine(num_blocks=1024, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512)
    engine.runner.latency_s = latency_s  # type: ignore[attr-defined]  # the fake's own knob
    return engine


def build_that_fails() -> Engine:
    engine = build()
    launch, num_launched = engine.runner.launch, 0

    def failing(batch: Any, watch: Any) -> Any:
        nonlocal num_launched
        num_launched += 1
        if num_launched == 8:
            raise RuntimeError("the device is on fire")
        return launch(batch, watch)

    engine.runner.launch = failing  # type: ignore[method-assign]
    return engine


class Reply:
    """An answer, streamed or not, with its ledgers and the client's own time."""

    def __init__(self, status: int, headers: Any, body: bytes, wall_ns: int, *, stream: bool) -> None:
        self.status, self.headers, self.wall_ns = status, headers, wall_ns
        if stream and status == 200:
            frames = [frame.removeprefix("data: ") for frame in body.decode().split("\n\n") if frame]
            self.events = [json.loads(frame) for frame in frames if frame != "[DONE]"]
        else:
            self.events = [json.loads(body)]
        self.ledgers: list[dict[str, Any]] = next(
            (event["roseinfer_ledger"] for event in reversed(self.events) if "roseinfer_ledger" in event), []
        )


async def ask(server: LiveServer, headers: dict[str, str] | None = None, **body: Any) -> Reply:
    body = {"prompt": [1, 2, 3], "temperature": 0, "ignore_eos": True, "max_tokens": 8} | body
    began = time.monotonic_ns()
    url = server.url + "/v1/completions"
    async with server.session.post(url, json=body, headers=ASKED if headers is None else headers) as response:
        content = await response.read()
        wall_ns = time.monotonic_ns() - began
        return Reply(response.status, response.headers, content, wall_ns, stream=bool(body.get("stream")))


def check(reply: Reply) -> None:
    for ledger in reply.ledgers:
        parts = ledger["parts_ns"]
        assert sum(parts.values()) == ledger["total_ns"] <= reply.wall_ns
        assert all(isinstance(duration, int) and duration >= 0 for duration in parts.values())
        named = [name for name in parts if name not in LAST_PARTS]
        first, decode = named[: len(FIRST_PARTS)], named[len(FIRST_PARTS) :]
        assert first == FIRST_PARTS[: len(first)]
        assert all(Cause(name.removeprefix("decode.")) for name in decode)
    entries = reply.headers["Server-Timing"].split(", ")
    assert all(re.fullmatch(r"[\w.]+;dur=\d+\.\d{3}", entry) for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_request_that_reaches_its_length(stream: bool, num_choices: int) -> None:
    async with live(build) as server:
        reply = await ask(server, n=num_choices, stream=stream)
    check(reply)
    assert [ledger["finish_reason"] for ledger in reply.ledgers] == ["length"] * num_choices
    for ledger in reply.ledgers:
        assert ledger["num_output_tokens"] == 8
        assert {*FIRST_PARTS, "decode.decode", "engine_outbox", "delivery"} <= set(ledger["parts_ns"])
    timing = dict(re.findall(r"([\w.]+);dur=([\d.]+)", reply.headers["Server-Timing"]))
    parts = {name: round(duration / 1e6, 3) for name, duration in reply.ledgers[0]["parts_ns"].items()}
    told = FIRST_PARTS if stream else list(parts)  # a stream's header goes out before its first token
    assert {name: float(timing[name]) for name in told} == {name: parts[name] for name in told}


@asynccontextmanager
async def streaming(
    ledgers: Callable[[Sequence[RequestTimeline], int], Awaitable[list[dict[str, object]]]],
) -> AsyncGenerator[tuple[ScriptedEngine, asyncio.Task[ClientResponse]]]:
    """An engine that has a stream's request, whose ledger is to come of `ledgers`, and the answer."""
    instruments = replace(INSTRUMENTS, ledgers=ledgers)
    body = {"prompt": "a", "max_tokens": 3, "stream": True}
    async with serving(ScriptedEngine(), instruments=instruments) as server, asyncio.timeout(10):
        asking = asyncio.create_task(server.session.post(server.url + "/v1/completions", json=body, headers=ASKED))
        await server.engine.received()
        yield server.engine, asking


async def test_a_streams_first_tokens_wait_for_no_causes() -> None:
    """On a busy host causes come late, and a first write may have several tokens already."""
    are_known = asyncio.Event()

    async def late(timelines: Sequence[RequestTimeline], until_ns: int) -> list[dict[str, object]]:
        if any(len(each.arrivals) > 1 for each in timelines):
            await are_known.wait()
        return await INSTRUMENTS.ledgers(timelines, until_ns)

    async with streaming(late) as (engine, asking):
        engine.say("xyz", FinishReason.LENGTH)
        async with await asking as response:
            assert b'"xyz"' in await response.content.readuntil(b"\n\n")
            assert "receive;dur=" in response.headers["Server-Timing"]
            are_known.set()
            assert b"roseinfer_ledger" in await response.content.read()


async def test_a_late_ledger_takes_the_error_event_from_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop without a core gets to the ledger when the time for the last event has passed."""
    monkeypatch.setattr(middleware, "FAREWELL_TIMEOUT_S", 0.01)

    async def late(timelines: Sequence[RequestTimeline], until_ns: int) -> list[dict[str, object]]:
        if timelines[0].finish_reason is not None:
            await asyncio.sleep(0.05)
        return await INSTRUMENTS.ledgers(timelines, until_ns)

    async with streaming(late) as (engine, asking):
        engine.say("x")
        async with await asking as response:
            engine.fail(EngineDead("killed"))
            content = await response.content.read()
    assert b"engine_dead" in content
    assert b"roseinfer_ledger" in content


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_meets_a_stop(stream: bool) -> None:
    async with live(build) as server:
        tokens = await tokens_of(server)
        by_token = await ask(server, stream=stream, stop_token_ids=[tokens[4]], max_tokens=30)
        by_text = await ask(server, stream=stream, stop=[chr(tokens[4])], max_tokens=30)
        await server.until(lambda: len(server.tape.finished) == 3)
    for reply in (by_token, by_text):
        check(reply)
        assert [ledger["finish_reason"] for ledger in reply.ledgers] == ["stop"]
        assert reply.ledgers[0]["num_output_tokens"] >= 5  # the engine hears late of a stop in the text


async def tokens_of(server: LiveServer) -> list[int]:
    """Those of the usual request, each of which is a character."""
    reply = await ask(server)
    return [ord(character) for character in reply.events[0]["choices"][0]["text"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_the_engine_fails(stream: bool) -> None:
    async with live(build_that_fails) as server:
        reply = await ask(server, stream=stream, max_tokens=50)
        check(reply)
        assert reply.status == (200 if stream else 500)
        [ledger] = reply.ledgers
        assert (ledger["finish_reason"], ledger["num_output_tokens"]) == ("error", 7)
        assert ledger["parts_ns"]["cut_short"] > 0
        assert "error" in reply.events[-1]


@pytest.mark.parametrize("body", [{"prompt": [1] * 600}, {"max_tokens": 0}, {"prompt": ""}, {"nonsense": 1}])
async def test_a_request_that_is_rejected(body: dict[str, Any]) -> None:
    async with live(build) as server:
        reply = await ask(server, **body)
        check(reply)
        assert reply.status == 400
        [ledger] = reply.ledgers
        assert ledger["finish_reason"] == "rejected"
        assert set(ledger["parts_ns"]) <= {"receive", "tokenize", "submit_lag"}


async def test_a_request_whose_client_went_away() -> None:
    """No client is left to read it, so the ledger is taken from its timeline."""
    async with live(build) as server:
        asking = asyncio.create_task(ask(server, stream=True, max_tokens=500))
        await server.until(lambda: any(timeline.token_ns for timeline in server.tape.timelines))
        asking.cancel()
        await server.until(lambda: bool(server.tape.finished))
        [timeline] = server.tape.finished
    assert timeline.finish_reason is FinishReason.ABORT
    parts = server.attribution.ledger(timeline, timeline.end_ns)["parts_ns"]
    assert isinstance(parts, dict)
    assert sum(parts.values()) == timeline.end_ns - timeline.recv_ns
    assert list(parts)[: len(FIRST_PARTS)] == FIRST_PARTS
    assert "cut_short" in parts


@pytest.mark.parametrize("value", ["", "2", "yes", "01"])
async def test_a_header_that_means_nothing_is_refused(value: str) -> None:
    async with live(build) as server:
        reply = await ask(server, headers={"x-roseinfer-ledger": value})
        assert (reply.status, reply.events[0]["error"]["param"]) == (400, "x-roseinfer-ledger")
        assert reply.ledgers == []


@pytest.mark.parametrize("headers", [{}, {"x-roseinfer-ledger": "0"}])
async def test_only_those_who_ask_get_a_ledger(headers: dict[str, str]) -> None:
    async with live(build) as server:
        replies = [await ask(server, headers=headers, stream=stream) for stream in (False, True)]
    assert all(not reply.ledgers and "Server-Timing" not in reply.headers for reply in replies)


async def test_all_ledgers_together_are_what_the_metrics_say() -> None:
    async with live(build) as server:
        requests = (ask(server, prompt=[1 + i, 2, 3], max_tokens=5 + 7 * i, stream=i % 2 == 0) for i in range(6))
        replies = await asyncio.gather(*requests)
        await server.until(lambda: len(server.tape.finished) == 6)
        async with server.session.get(server.url + "/metrics") as response:
            families = text_string_to_metric_families(await response.text())
            sums = {sample.name: sample.value for family in families for sample in family.samples}
        attributed = dict(server.attribution.total_ns)
    total = Counter[str]()
    for reply in replies:
        check(reply)
        total.update(reply.ledgers[0]["parts_ns"])
    for part in FIRST_PARTS:
        assert sums[f"roseinfer_{part}_seconds_sum"] == pytest.approx(total[part] / 1e9, abs=1e-9)
    decode = sum(duration for name, duration in total.items() if name.startswith("decode."))
    assert sums["roseinfer_inter_token_latency_seconds_sum"] == pytest.approx(decode / 1e9, abs=1e-9)
    engine_only = [Cause.DECODE, Cause.PREFILL_OF_OTHERS, Cause.BATCH_GROWTH, Cause.SAMPLE_SYNC, Cause.UNKNOWN]
    assert {cause: attributed[cause] for cause in engine_only} == {c: total[f"decode.{c}"] for c in engine_only}


# --- the engine's clock and the wire's --------------------------------------------------------------------------------


async def timelines_at(stream_interval: int) -> tuple[LiveServer, list[RequestTimeline]]:
    async with live(partial(build, latency_s=0.01), stream_interval=stream_interval) as server:
        await asyncio.gather(*(ask(server, prompt=[1 + i], max_tokens=65, stream=True) for i in range(4)))
        await server.until(lambda: len(server.tape.finished) == 4)
    return server, server.tape.finished


def gaps_by_request(recording: Recording, clock: Clock) -> dict[int, list[Gap]]:
    found: dict[int, list[Gap]] = defaultdict(list)
    for gap in gaps_of(recording, clock):
        found[gap.serial].append(gap)
    return found


@on_a_calm_machine
async def test_what_the_client_sees_changes_with_the_interval_and_what_the_engine_does_does_not() -> None:
    """With an interval of 8 a write holds eight gaps of the engine, whose split is the same either way."""
    for interval, num_writes in ((1, 65), (8, 9)):
        server, timelines = await timelines_at(interval)
        steps = {step.tokens_ns for step in server.tape.steps}
        for timeline in timelines:
            assert len(timeline.token_ns) == 65
            assert steps.issuperset(timeline.token_ns)
            # On a busy machine, tokens that are due together share a write.
            assert num_writes / 3 < len(timeline.write_ns) <= num_writes
        recording = server.flight.snapshot().recording()
        engine_gaps, wire_gaps = gaps_by_request(recording, "engine"), gaps_by_request(recording, "wire")
        for serial, gaps in wire_gaps.items():
            assert all(sum(gap.parts.values()) == gap.duration_ns for gap in (*gaps, *engine_gaps[serial]))
            assert len(engine_gaps[serial]) == 64
            within = [sum(gap.start_ns <= token.end_ns <= gap.end_ns for token in engine_gaps[serial]) for gap in gaps]
            assert sorted(within)[len(within) // 2] == interval
