"""Every fact of a step stands in the field of its name, though the engine fills them in by their order."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec

from roseinfer.engine.core.engine import LoopState
from roseinfer.engine.core.steps import Outcome, StepCounts
from roseinfer.engine.core.stopwatch import Stopwatch
from roseinfer.records import BlockedBy, PhaseTimes
from tests.unit.engine.harness import make_engine

COUNTS = {
    name: 100 + number for number, name in enumerate(StepCounts.__struct_fields__) if name != "blocked_by"
}  # all different
PHASES, AHEAD = PhaseTimes(schedule=50), PhaseTimes(schedule=51)


def test_each_fact_is_in_its_field() -> None:
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
    engine.phases = SimpleNamespace(clock=lambda: 13)
    engine.gc_ns, engine._read_gc_ns = 20, 6
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
        "phases": PHASES,
        "ahead": AHEAD,
    }
