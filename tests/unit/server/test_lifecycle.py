"""How often an engine is started again, when one that hangs is ended, and what the log holds of one that is lost.

The way from bind to exit code has its tests in integration/.
"""

import asyncio
import json
import logging
import time
from pathlib import Path

import pytest

from roseinfer.config.options import Config, EngineConfig, ServerConfig
from roseinfer.errors import ConfigError, EngineDead, EngineFailed
from roseinfer.observe.logs import JsonFormatter
from roseinfer.records import Observer
from roseinfer.server import lifecycle
from tests.unit.server.harness import INSTRUMENTS, Listener, ScriptedEngine

TRACEBACK = 'RuntimeError: the device is on fire\nTraceback (most recent call last):\n  File "runner.py", line 1'


async def test_the_engines_own_words_reach_the_log_once_and_without_our_frames(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine()
    engine.start_error = EngineFailed("the engine failed")
    engine.start_error.add_note(TRACEBACK)
    engine.started.set()
    config = Config(server=ServerConfig(port=0, ops_port=0))
    assert await lifecycle.run(config, engine, Listener(), INSTRUMENTS, lambda _: None) == 70
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    line = json.loads(JsonFormatter().format(record))
    assert line["message"] == "giving up: the engine failed"
    assert line["exception"].endswith(TRACEBACK)
    assert line["exception"].count("Traceback") == 1
    assert caplog.text.count("the device is on fire") == 1


def test_exit_allows_none() -> None:
    assert not lifecycle.Restarts(EngineConfig()).allow_next()


def test_one_in_ten_minutes() -> None:
    now_s = 0.0
    restarts = lifecycle.Restarts(EngineConfig(on_failure="restart"), lambda: now_s)
    assert [restarts.allow_next() for _ in range(2)] == [True, False]
    now_s = 599.0
    assert not restarts.allow_next()
    now_s = 600.0
    assert [restarts.allow_next() for _ in range(2)] == [True, False]


def test_a_thread_cannot_be_started_again() -> None:
    with pytest.raises(ConfigError) as caught:
        Config(engine=EngineConfig(on_failure="restart", transport="thread"))
    assert caught.value.param == "engine.on_failure"


async def test_who_observes_hears_of_an_engine_that_stands_still_and_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "LOOK_INTERVAL_S", 0.001)
    engine, observer, heard = ScriptedEngine(), Observer(), list[int]()
    monkeypatch.setattr(observer, "on_stall", heard.append)
    dying = asyncio.create_task(lifecycle.wait_for_death(engine, observer))
    now_ns = time.monotonic_ns()
    for since_ns in (now_ns, now_ns - 2 * lifecycle.STALL_NS, 0):  # a step under way, one that takes long, none
        engine.stands_since_ns = since_ns
        await asyncio.sleep(0.02)
    engine.die(EngineDead("enough"))
    await dying
    assert heard == [now_ns - 2 * lifecycle.STALL_NS, 0]


async def test_a_hang_ends_after_a_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "LOOK_INTERVAL_S", 0.01)
    engine = ScriptedEngine()
    dying = asyncio.create_task(lifecycle.wait_for_death(engine, Observer()))
    await asyncio.sleep(0.05)
    assert not dying.done()
    engine.trouble = "no engine step for 1 s with work in flight"
    error = await asyncio.wait_for(dying, 5)
    assert isinstance(error, EngineDead)
    assert error.message == "no engine step for 1 s with work in flight"
