"""How often an engine is started again, and what the log holds of one that is lost.

The way from bind to exit code has its tests in integration/.
"""

import json
import logging
from pathlib import Path

import pytest

from roseinfer.config.options import Config, EngineConfig, ServerConfig
from roseinfer.errors import ConfigError, EngineFailed
from roseinfer.observe.logs import JsonFormatter
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
