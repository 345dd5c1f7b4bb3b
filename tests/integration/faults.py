"""Troubles for a live server, streams that suffer from them, and a judge of the gaps that they made."""

import contextlib
import functools
import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from roseinfer.config.options import Config, ModelConfig
from roseinfer.engine.core.batch import Launched, ScheduledBatch, Watch
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.link.transport import ProcessTransport
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import Gap, gaps_of
from tests.integration.faulty_engine import LATENCY_S
from tests.integration.live_server import LiveServer
from tests.unit.engine.harness import make_engine

DELAY_S = 0.2
MIN_GAP_NS = int(DELAY_S / 2 * 1e9)
NUM_STREAMS = 6
WARM_TOKENS = 30

Trouble = Callable[[ScheduledBatch, Watch], None]


class TroubledEngine:
    """The fake engine, and what happens in its launches: once each time that a test arms it."""

    def __init__(self, trouble: Trouble | None = None, latency_per_token_s: float = 0.0, **options: Any) -> None:
        defaults = {"num_blocks": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 1100}
        self.engine = make_engine(**(defaults | options))
        self.is_armed = False
        runner = self.engine.runner
        runner.latency_s = LATENCY_S  # type: ignore[attr-defined]  # the fake's own knobs
        runner.latency_per_token_s = latency_per_token_s  # type: ignore[attr-defined]
        launch = runner.launch

        def launch_with_trouble(batch: ScheduledBatch, watch: Watch) -> Launched:
            if trouble is not None and self.is_armed and not batch.token_ids.size:
                self.is_armed = False
                trouble(batch, watch)
            return launch(batch, watch)

        runner.launch = launch_with_trouble  # type: ignore[method-assign]

    def build(self) -> Engine:
        return self.engine

    async def strike(self, server: LiveServer) -> None:
        """Arm it, and wait until it has happened and is over."""
        self.is_armed = True
        await server.until(lambda: not self.is_armed)


def process(model: str = "", *options: str) -> ProcessTransport:
    """An engine of its own, so that what happens to the front end does not happen to it."""
    return ProcessTransport(Config(model=ModelConfig(path=model)), ("-m", "tests.integration.faulty_engine", *options))


def hang(engine_pid: int) -> None:
    """The engine of a real server makes no step any more, and its process is there."""
    os.kill(engine_pid, signal.SIGSTOP)


def die(engine_pid: int) -> None:
    """The engine of a real server is gone between two instructions, as the kernel does it when memory is short."""
    os.kill(engine_pid, signal.SIGKILL)


Strike = Callable[[LiveServer], Any]


explained = Counter[Cause]()
"""The parts of all gaps that were planted so far, but for those that nothing can explain."""


async def provoke(server: LiveServer, strike: Strike, times: int = 2) -> None:
    """Streams that run evenly, and then a few strikes apart from each other."""
    server.start(NUM_STREAMS)
    await server.until(lambda: len(server.tape.timelines) >= NUM_STREAMS)
    await server.generated(WARM_TOKENS)
    for _ in range(times):
        await strike(server)
        await server.generated(8)


Test = TypeVar("Test", bound=Callable[..., Any])


def on_a_calm_machine(test: Test) -> Test:
    """Try it three times: a machine that stalls by itself, for tens of milliseconds, plants causes of its own."""

    @functools.wraps(test)
    async def attempts(*arguments: Any, **named: Any) -> None:
        for _ in range(2):
            with contextlib.suppress(AssertionError):
                await test(*arguments, **named)
                return
        await test(*arguments, **named)

    return attempts  # type: ignore[return-value]  # the same signature


def judge(server: LiveServer, cause: Cause, is_planted: Callable[[Gap], bool] = lambda _: True) -> None:
    """At least 95 % of the long slow gaps have the cause, live and in the recording, and their parts add up."""
    planted = [(gap, t) for gap, t in server.slow if gap.duration_ns >= MIN_GAP_NS and is_planted(gap)]
    assert planted, "nothing was slow"
    others = [gap for gap, _ in planted if gap.cause is not cause]
    assert len(others) <= 0.05 * len(planted), others
    for gap, timeline in server.slow:
        stamps = timeline.write_ns if timeline.is_streamed else timeline.token_ns
        assert sum(gap.parts.values()) == gap.duration_ns == stamps[gap.index] - stamps[gap.index - 1]
    if cause is not Cause.UNKNOWN:
        for gap, _ in planted:
            explained.update(gap.parts)
    recorded = {(gap.serial, gap.end_ns): gap for gap in gaps_of(server.flight.snapshot().recording())}
    assert all(sum(gap.parts.values()) == gap.duration_ns for gap in recorded.values())
    alike = [recorded[gap.serial, gap.end_ns].cause == gap.cause for gap, _ in planted]
    assert alike.count(True) >= 0.95 * len(alike)
