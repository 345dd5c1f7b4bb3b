"""What the log is told when the engine is lost. The way from bind to exit code has its tests in integration/."""

import json
import logging
from pathlib import Path

import pytest

from roseinfer.config.tree import Config, ServerConfig
from roseinfer.errors import EngineFailed
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
