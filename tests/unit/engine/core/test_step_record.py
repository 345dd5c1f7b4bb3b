"""Every fact of a step stands in the field of its name, though the engine fills them in by their order."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec

from roseinfer.engine.core.engine import LoopState
from roseinfer.engine.core.steps import Outcome, StepCounts
from roseinfer.engine.core.stopwatch import Stopwatch
from roseinfer.records import BlockedBy, PhaseTimes
from tests.unit.engine.harness import make_engine, make_request

COUNTS = {
    name: 100 + number for number, name in enumerate(StepCounts.__struct_fields__) if name != "blocked_by"
}  # all different
PHASES, AHEAD = PhaseTimes(schedule=50), PhaseTimes(schedule=51)


def make_scripted_engine(clock_ns: int) -> Any:
    engine: Any = make_engine(pipeline_depth=1)
    counts = StepCounts(**COUNTS, blocked_by=BlockedBy.SLOTS)
    engine.scheduler = SimpleNamespace(
        pop_ended=list,
        pop_started=list,
        counts=counts,
        num_running=1,
        num_waiting=2,
        kv_cache=SimpleNamespace(pool=SimpleNamespace(num_used=3, num_cached=4, num_blocks=5)),
    )
    engine.phases = SimpleNamespace(clock=lambda: clock_ns)
    engine.gc_ns, engine._read_gc_ns = 20, 6
    return engine


def test_each_fact_is_in_its_field() -> None:
    engine = make_scripted_engine(13)
    watches = [
        cast("Stopwatch", SimpleNamespace(step_id=10 + number, start_ns=11, times=lambda times=times: times))
        for number, times in enumerate((PHASES, AHEAD))
    ]
    launched = SimpleNamespace(h2d_bytes=7, graph_rows=8)
    output = engine._build_output(
        Outcome(b"", b"", [], 9), *watches, 12, launched, LoopState(15, 16, is_profiled=True), 17, (18, 19)
    )
    assert msgspec.structs.asdict(output.record) == {
        **COUNTS,
        "step_id": 10,
        "start_ns": 11,
        "tokens_ns": 12,
        "end_ns": 13,
        "num_running": 1,
        "num_waiting": 2,
        "num_used_blocks": 3,
        "num_cached_blocks": 4,
        "num_total_blocks": 5,
        "num_generated_tokens": 9,
        "outbox_depth": 15,
        "outbox_wait_ns": 16,
        "gc_ns": 17,
        "late_gc_ns": 14,
        "h2d_bytes": 7,
        "graph_rows": 8,
        "blocked_by": BlockedBy.SLOTS,
        "is_profiled": True,
        "pipeline_depth": 1,
        "cpu_throttled_ns": 18,
        "cpu_wait_ns": 19,
        "late_throttled_ns": 0,
        "late_wait_ns": 0,
        "phases": PHASES,
        "ahead": AHEAD,
    }


def test_a_wait_for_a_core_after_the_tokens_is_late_and_counts_for_the_next_step_too() -> None:
    """As of a server whose quota is used up while it builds its outputs: the tokens wait, and so does the next step."""
    engine: Any = make_engine()
    engine.add_request(make_request("a", max_tokens=8))
    clock, pop_ended = engine.phases.clock, engine.scheduler.pop_ended
    stopped_ns = seen_ns = 0

    def look(_: int) -> tuple[int, int]:
        nonlocal seen_ns
        found_ns, seen_ns = stopped_ns - seen_ns, stopped_ns
        return found_ns, 2 * found_ns

    def stop_and_pop() -> Any:
        nonlocal stopped_ns
        stopped_ns += 5_000_000
        return pop_ended()

    engine.phases.clock, engine.look_for_waits = (lambda: clock() + stopped_ns), look
    engine.scheduler.pop_ended = stop_and_pop
    stopped = engine.step().record
    engine.scheduler.pop_ended = pop_ended
    following = engine.step().record
    assert (stopped.cpu_throttled_ns, stopped.cpu_wait_ns) == (0, 0)
    assert (stopped.late_throttled_ns, stopped.late_wait_ns) == (5_000_000, 10_000_000)
    assert (following.cpu_throttled_ns, following.cpu_wait_ns) == (5_000_000, 10_000_000)
    assert (following.late_throttled_ns, following.late_wait_ns) == (0, 0)
