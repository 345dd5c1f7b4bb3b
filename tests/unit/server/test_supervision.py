"""How often an engine is started again, and when one that hangs is ended."""

import asyncio

import pytest

from roseinfer.config.tree import Config, EngineConfig
from roseinfer.errors import ConfigError, EngineDead
from roseinfer.server import supervision
from roseinfer.server.supervision import Restarts, wait_for_death
from tests.unit.server.harness import ScriptedEngine


def test_exit_allows_none() -> None:
    assert not Restarts(EngineConfig()).take()


def test_one_in_ten_minutes() -> None:
    now_s = 0.0
    restarts = Restarts(EngineConfig(on_failure="restart"), lambda: now_s)
    assert [restarts.take() for _ in range(2)] == [True, False]
    now_s = 599.0
    assert not restarts.take()
    now_s = 600.0
    assert [restarts.take() for _ in range(2)] == [True, False]


def test_a_thread_cannot_be_started_again() -> None:
    with pytest.raises(ConfigError) as caught:
        Config(engine=EngineConfig(on_failure="restart", transport="thread"))
    assert caught.value.param == "engine.on_failure"


async def test_a_hang_ends_after_a_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "LOOK_INTERVAL_S", 0.01)
    engine = ScriptedEngine()
    dying = asyncio.create_task(wait_for_death(engine))
    await asyncio.sleep(0.05)
    assert not dying.done()
    engine.trouble = "no engine step for 1 s with work in flight"
    error = await asyncio.wait_for(dying, 5)
    assert isinstance(error, EngineDead)
    assert error.message == "no engine step for 1 s with work in flight"
