"""Who is let in while others are served: by places in the engine, by tokens, by what the last moment knows."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp

from roseinfer.engine.queue_estimate import MIN_STARTS, QueueEstimate
from roseinfer.messages import Request, SamplingParams
from roseinfer.records import FinishReason
from tests.unit.server.harness import Answer, ScriptedEngine, Server, says, serving


def sequence(name: str, num_prompt_tokens: int = 1, max_tokens: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(request_id=name, prompt_token_ids=[1] * num_prompt_tokens, params=params)


def engine_of_one_place(priority_wait_s: float = 0.0) -> ScriptedEngine:
    """Who comes second waits for three seconds and a half."""
    engine = ScriptedEngine()
    engine.queue_estimate = QueueEstimate(1, priority_wait_s=priority_wait_s)
    for _ in range(MIN_STARTS):
        engine.queue_estimate.measure_place(3_500_000_000)
    return engine


async def upload(server: Server, meanwhile: Callable[[], Awaitable[None]]) -> Answer:
    """A completion whose head has been admitted when `meanwhile` happens, and its body not read."""
    content = json.dumps({"prompt": "Hi"}).encode()

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield content[:-1]
        while not server.engine.opened:
            await server.get("/livez")
        await meanwhile()
        yield content[-1:]

    headers = {"Content-Type": "application/json"}
    return await server.request("POST", "/v1/completions", data=pieces(), headers=headers)


@asynccontextmanager
async def stalled(server: Server) -> AsyncIterator[aiohttp.ClientResponse]:
    """A stream that is over for the engine and mostly unread by its client."""
    engine = server.engine
    opening = asyncio.create_task(server.open())
    await engine.received()
    engine.flood()
    engine.say("", FinishReason.LENGTH)
    async with await opening as response:
        yield response


async def test_a_client_that_only_sends_its_body_blocks_no_other() -> None:
    engine, others = engine_of_one_place(), list[Answer]()
    engine.reply = says("a")
    async with serving(engine, max_queue_wait_s=1) as server:

        async def another() -> None:
            others.append(await server.complete())

        assert (await upload(server, another)).status == 200
    assert [answer.status for answer in others] == [200]


async def test_one_long_request_before_a_burst_causes_no_refusal() -> None:
    engine = ScriptedEngine(says("a"))
    engine.queue_estimate = QueueEstimate(1)
    for num_measured in range(MIN_STARTS):
        engine.queue_estimate.measure_place(60_000_000_000)
        engine.queue_estimate.add_request(sequence(f"before-{num_measured}"))
    async with serving(engine) as server:
        assert (await server.complete()).status == 429
    engine.queue_estimate = QueueEstimate(1)
    engine.queue_estimate.measure_place(60_000_000_000)
    for i in range(MIN_STARTS):
        engine.queue_estimate.add_request(sequence(f"before-{i}"))
    async with serving(engine) as server:
        assert (await server.complete()).status == 200


async def test_a_client_that_only_reads_blocks_no_other() -> None:
    engine = engine_of_one_place()
    async with serving(engine, max_queue_wait_s=1) as server, stalled(server):
        engine.reply = says("quick")
        assert (await server.complete()).status == 200
        assert len(server.service._exchanges) == 1, "the first one is not through: else this test says nothing"


async def test_who_found_a_place_that_is_gone_when_its_body_has_come_is_refused() -> None:
    engine = engine_of_one_place()
    async with serving(engine, max_queue_wait_s=1) as server:

        async def another_is_first() -> None:
            engine.queue_estimate.add_request(sequence("another"))

        refused = await upload(server, another_is_first)
    assert (refused.status, refused.error["code"], refused.headers["Retry-After"]) == (429, "overloaded", "4")
    assert engine.requests == []
    assert [timeline.finish_reason for timeline in engine.closed] == [FinishReason.REJECTED]


async def test_tokens_of_prompts_and_of_what_may_be_generated_are_limited() -> None:
    engine = ScriptedEngine(says("a"))
    async with serving(engine, max_inflight_tokens=20) as server:
        alone = await server.complete(max_tokens=100)
        engine.queue_estimate.add_request(sequence("another", num_prompt_tokens=4, max_tokens=6))
        refused = [await server.complete(max_tokens=9), await server.complete(max_tokens=4, n=2)]
        fitting = [await server.complete(max_tokens=8), await server.complete(max_tokens=3, n=2)]
    assert [answer.status for answer in (alone, *fitting)] == [200] * 3, (
        "a request that is alone is served, and each that fits"
    )
    for answer in refused:
        assert (answer.status, answer.error["code"], answer.error["type"]) == (429, "overloaded", "rate_limit_error")
        assert "more than 20" in answer.error["message"]
        assert answer.headers["Retry-After"] == "1"
    assert len(engine.requests) == 1 + 1 + 2


def crowd(engine: ScriptedEngine) -> None:
    """Three are before a usual request, and one, which has its place, before an urgent one."""
    for i in range(3):
        engine.queue_estimate.add_request(sequence(f"before-{i}"))


async def test_a_refused_request_hears_the_wait_of_its_own_priority() -> None:
    engine = engine_of_one_place(priority_wait_s=1.0)
    crowd(engine)
    async with serving(engine, max_queue_wait_s=1000, max_inflight_tokens=20) as server:
        usual, urgent = await server.complete(max_tokens=100), await server.complete(max_tokens=100, priority=-50)
    assert [answer.status for answer in (usual, urgent)] == [429] * 2
    assert [answer.headers["Retry-After"] for answer in (usual, urgent)] == ["11", "4"]


async def test_whose_body_was_not_read_is_taken_for_a_usual_one() -> None:
    engine = engine_of_one_place(priority_wait_s=1.0)
    async with serving(engine, max_queue_wait_s=1000, max_inflight=1) as server, stalled(server):
        crowd(engine)
        refused = await server.complete()
    assert (refused.status, refused.headers["Retry-After"]) == (429, "11")
    assert "1 HTTP requests are being served" in refused.error["message"]
