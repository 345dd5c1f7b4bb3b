"""An engine process without a model that gets into trouble now and then. Run with the descriptor's number."""

import gc
import socket
import sys
import time
from collections.abc import Callable

from roseinfer.config.options import Config
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.link import frames as link
from roseinfer.messages import StartupProgress
from roseinfer.wiring import engine_main
from tests.unit.engine.harness import make_engine

LATENCY_S = 0.003
GC_EVERY = 60  # steps


def huge_heap() -> list[list[int]]:
    """Enough containers to keep a collection busy for two hundred milliseconds on this processor."""
    heap: list[list[int]] = []
    busy_s = 0.0
    while busy_s < 0.2:
        heap += [[] for _ in range(2_000_000)]
        began_s = time.process_time()
        gc.collect()
        busy_s = time.process_time() - began_s
    return heap


def build_faulty_engine(config: Config, _: Callable[[StartupProgress], None]) -> Engine:
    """The model path names the trouble: `collects`, or none."""
    engine = make_engine(num_blocks=4096, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=1100)
    engine.runner.latency_s = LATENCY_S  # type: ignore[attr-defined]  # the fake's own knob
    if config.model.path == "collects":
        launch, num_launched = engine.runner.launch, 0
        heap: list[list[int]] = []

        def collecting(batch: object, watch: object) -> object:
            nonlocal num_launched
            num_launched += 1
            if num_launched == 1:
                heap.extend(huge_heap())  # not before: what start-up made is frozen
            elif num_launched % GC_EVERY == 0:
                gc.collect()
            return launch(batch, watch)  # type: ignore[arg-type]

        engine.runner.launch = collecting  # type: ignore[method-assign, assignment]
    return engine


def shrink_link(descriptor: int) -> None:
    """A link that holds little, so that the engine soon has to wait for a front end that does not read."""
    with socket.socket(fileno=descriptor) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection.detach()
    link._MAX_OUTBOX_BYTES = 4096


if __name__ == "__main__":
    *options, descriptor = sys.argv[1:]
    if "--small-link" in options:
        shrink_link(int(descriptor))
    sys.exit(engine_main(int(descriptor), build=build_faulty_engine))
