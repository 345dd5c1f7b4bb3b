"""An engine process without a model: what `ProcessTransport` starts in tests. Run with the descriptor's number."""

import sys
from collections.abc import Callable
from pathlib import Path

from roseinfer.config.options import Config
from roseinfer.engine.core.engine import Engine
from roseinfer.errors import ConfigError
from roseinfer.messages import StartupProgress
from roseinfer.records import LifecycleState
from roseinfer.wiring import engine_main
from tests.unit.engine.harness import make_engine
from tests.unit.engine.poison import poison


class TextProfiler:
    """Writes a file, so that a test sees that it ran."""

    def start(self) -> None: ...

    def stop(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / "trace.json").write_text("{}")


def build_fake_engine(config: Config, on_progress: Callable[[StartupProgress], None]) -> Engine:
    """The fake engine, 2 ms a step. The model path selects the faults that the contract tests inject."""
    on_progress(StartupProgress(LifecycleState.LOADING, "weights", "none"))
    if config.model.path == "bad":
        raise ConfigError("there is no such model", param="model.path")
    engine = make_engine(num_blocks=512, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512)
    engine.profiler = TextProfiler()
    engine.runner.latency_s = 0.002  # type: ignore[attr-defined]  # the fake's own knob
    if config.model.path == "fails":
        launch, num_launched = engine.runner.launch, 0

        def failing(batch: object, watch: object) -> object:
            nonlocal num_launched
            num_launched += 1
            if num_launched == 5:
                raise RuntimeError("the device is on fire")
            return launch(batch, watch)  # type: ignore[arg-type]

        engine.runner.launch = failing  # type: ignore[method-assign, assignment]
    if config.model.path == "poisoned":
        poison(engine, lambda request_id, _: request_id.startswith("bad"))
    return engine


if __name__ == "__main__":
    sys.exit(engine_main(int(sys.argv[1]), build=build_fake_engine))
