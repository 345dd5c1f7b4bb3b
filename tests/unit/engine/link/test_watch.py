"""An engine that stands still is reported, and one that hangs is ended."""

import asyncio
import time

import pytest

from roseinfer.engine.link import watch
from roseinfer.errors import EngineDead
from roseinfer.records import Observer
from tests.unit.server.harness import ScriptedEngine


async def test_who_observes_hears_of_an_engine_that_stands_still_and_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "LOOK_INTERVAL_S", 0.001)
    engine, observer, heard = ScriptedEngine(), Observer(), list[int]()
    monkeypatch.setattr(observer, "on_stall", heard.append)
    dying = asyncio.create_task(watch.wait_for_death(engine, observer))
    now_ns = time.monotonic_ns()
    for since_ns in (now_ns, now_ns - 2 * watch.STALL_NS, 0):  # a step under way, one that takes long, none
        engine.stalled_since_ns = since_ns
        await asyncio.sleep(0.02)
    engine.die(EngineDead("enough"))
    await dying
    assert heard == [now_ns - 2 * watch.STALL_NS, 0]


async def test_a_hang_ends_after_a_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_INTERVAL_S", 0.01)
    engine = ScriptedEngine()
    dying = asyncio.create_task(watch.wait_for_death(engine, Observer()))
    await asyncio.sleep(0.05)
    assert not dying.done()
    engine.trouble = "no engine step for 1 s with work in flight"
    error = await asyncio.wait_for(dying, 5)
    assert isinstance(error, EngineDead)
    assert error.message == "no engine step for 1 s with work in flight"
