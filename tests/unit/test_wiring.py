"""What the wiring decides itself, without a server."""

import logging

import msgspec
import pytest

from roseinfer import wiring
from roseinfer.config.options import Config, RunnerConfig
from tests.unit.observe.facts import ENGINE


@pytest.mark.parametrize(("device", "wanted", "depth"), [("cpu", 0, 0), ("cpu", 1, 0), ("cuda", 0, 0), ("cuda", 1, 1)])
def test_a_cpu_does_not_launch_ahead_and_the_log_says_so(
    device: str, wanted: int, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(runner=RunnerConfig(pipeline_depth=wanted))  # type: ignore[arg-type]
    info = msgspec.structs.replace(ENGINE, device=device)
    with caplog.at_level(logging.WARNING):
        assert wiring._pipeline_depth(config, info) == depth
    assert ("runner.pipeline_depth" in caplog.text) == (wanted != depth)
