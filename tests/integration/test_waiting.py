"""Why is it waiting: a real scheduler that has too little of something, and what is told of those who wait."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from roseinfer.config.options import CacheConfig, Config, SchedulerConfig
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.link.client import AsyncEngine
from roseinfer.engine.link.transport import ThreadTransport
from roseinfer.engine.queue_estimate import QueueEstimate
from roseinfer.observe.hub import Hub
from roseinfer.observe.recorder.flight import Flight
from roseinfer.records import RequestTimeline
from tests.integration.faults import on_a_calm_machine
from tests.unit.engine.harness import make_engine, make_request

STEP_S = 0.006  # several looks at a request that waits for a step
NUM_REQUESTS = 11


@asynccontextmanager
async def running(num_blocks: int = 64, **scheduler: Any) -> AsyncIterator[tuple[Flight, AsyncEngine]]:
    scheduler = {"max_num_seqs": 2, "max_num_batched_tokens": 64} | scheduler
    config = Config(scheduler=SchedulerConfig(**scheduler), cache=CacheConfig(block_size=8, num_blocks=num_blocks))
    flight = Flight(config, "1.2.3")

    def build(*_: object) -> Engine:
        engine = make_engine(num_blocks=num_blocks, max_model_len=64, **scheduler)
        engine.runner.latency_s = STEP_S  # type: ignore[attr-defined]  # the fake's own knob
        return engine

    client = AsyncEngine(
        ThreadTransport(config, build, check_when_idle=True), Hub([flight]), 30, QueueEstimate.of(config.scheduler)
    )
    flight.queue = client.queue_estimate.report
    await client.start(lambda _: None)
    try:
        yield flight, client
    finally:
        await client.close()


async def ask(
    client: AsyncEngine, request_id: str, *, num_prompt_tokens: int = 4, max_tokens: int = 30, priority: int = 0
) -> None:
    request = make_request(request_id, range(1, num_prompt_tokens + 1), salt=request_id, max_tokens=max_tokens)
    request = msgspec.structs.replace(request, priority=priority)
    now_ns = time.monotonic_ns()
    timeline = RequestTimeline(request_id=request_id, recv_ns=now_ns, parsed_ns=now_ns, tokenized_ns=now_ns)
    client.open_timeline(timeline)
    async for _ in client.generate([request], [timeline]):
        pass
    timeline.end_ns = time.monotonic_ns()
    client.close_timeline(timeline)


async def until_waiting(flight: Flight, request_id: str, option: str = "") -> dict[str, Any]:
    """What is told of the request once a step has left it out, because of this option."""
    for _ in range(500):
        told = flight.request(request_id)
        if told is not None and told["waiting"] and option in (told["waiting"]["option"] or "-"):
            return told
        await asyncio.sleep(0.002)
    raise AssertionError(f"{request_id} never waited for {option}: {told}")


@pytest.mark.parametrize(
    ("limits", "option", "value"),
    [
        ({"max_active_seqs": 2}, "scheduler.max_active_seqs", 2),
        ({}, "scheduler.max_num_seqs", 2),
        ({"num_blocks": 256, "max_active_seqs": 16, "max_prefill_seqs": 2}, "scheduler.max_prefill_seqs", 2),
        ({"num_blocks": 9, "max_active_seqs": 16}, "cache.num_blocks", 9),
    ],
)
@on_a_calm_machine
async def test_the_limit_is_named(limits: dict[str, int], option: str, value: int) -> None:
    async with running(**limits) as (flight, client):
        tasks = [
            asyncio.create_task(ask(client, f"r-{number}", num_prompt_tokens=24, max_tokens=20))
            for number in range(NUM_REQUESTS)
        ]
        last = f"r-{NUM_REQUESTS - 1}"
        told = await until_waiting(flight, last, option)
        assert told["stage"] == "waiting"
        assert (told["waiting"]["option"], told["waiting"]["value"]) == (option, value)
        assert str(value) in told["waiting"]["sentence"]
        assert told["waiting"]["is_place_exact"]
        await asyncio.gather(*tasks)
        ended = flight.request(last)
    assert ended is not None
    assert (ended["stage"], ended["waiting"]) == ("finished", None)


@on_a_calm_machine
async def test_an_urgent_request_has_its_place_before_those_that_it_overtakes() -> None:
    async with running(max_active_seqs=2, admission="priority") as (flight, client):
        tasks = [asyncio.create_task(ask(client, f"r-{number}", max_tokens=50)) for number in range(5)]
        await until_waiting(flight, "r-4", "scheduler.")
        tasks.append(asyncio.create_task(ask(client, "urgent", priority=-5)))
        told = await until_waiting(flight, "urgent", "scheduler.")
        await asyncio.gather(*tasks)
    assert (told["waiting"]["num_before"], told["waiting"]["is_place_exact"]) == (0, False)


@on_a_calm_machine
async def test_places_and_an_estimate() -> None:
    async with running(max_active_seqs=2) as (flight, client):
        tasks = [asyncio.create_task(ask(client, f"r-{number:02}", max_tokens=5)) for number in range(40)]
        first = await until_waiting(flight, "r-39", "scheduler.")
        assert first["waiting"]["estimate"] is None, "nothing has left the queue yet"
        while (told := flight.request("r-39")) is not None and told["waiting"]:
            waiting = told["waiting"]
            if waiting["estimate"]:
                break
            await asyncio.sleep(0.002)
        listed = [one for one in flight.requests()["requests"] if one["stage"] == "waiting"]
        places = [one["place"] for one in listed]
        await asyncio.gather(*tasks)
    estimate = waiting["estimate"]
    assert estimate, "it was over before anybody looked"
    assert 0 <= estimate["low_seconds"] <= estimate["seconds"] <= estimate["high_seconds"] < 10
    assert estimate["num_starts"] >= 8
    assert places == list(range(len(places)))
    assert first["waiting"]["num_before"] > waiting["num_before"] >= len(places) - 1
