"""Fixtures for tests of the engine."""

import pytest

from roseinfer.engine.core.batch import Launched, ScheduledBatch, Watch
from roseinfer.engine.core.engine import Engine
from tests.unit.engine.harness import RecordBatches


@pytest.fixture
def record_batches(monkeypatch: pytest.MonkeyPatch) -> RecordBatches:
    """Start keeping every batch an engine launches."""

    def start(engine: Engine) -> list[ScheduledBatch]:
        batches: list[ScheduledBatch] = []
        launch = engine.runner.launch

        def recording(batch: ScheduledBatch, watch: Watch) -> Launched:
            batches.append(batch)
            return launch(batch, watch)

        monkeypatch.setattr(engine.runner, "launch", recording)
        return batches

    return start
