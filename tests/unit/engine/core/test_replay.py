"""A recorded trace of arrivals, replayed: the sequence of batches is a golden file.

A refactor may not change it; a change of policy shows its difference in review. After such a change,
`python -m tests.unit.engine.test_replay` writes the new one.
"""

import json
from pathlib import Path
from typing import Any

from roseinfer.engine.core.batch import Launched, ScheduledBatch, Watch
from roseinfer.engine.invariants import assert_invariants
from tests.unit.engine.harness import make_engine, make_request

GOLDEN = Path(__file__).parent / "golden"


def describe(batch: ScheduledBatch) -> str:
    """`decode 3,1 | prefill 5@16+8*`: slots that decode; slot @ first position + tokens, * where it samples."""
    decode = ",".join(map(str, batch.slots[: batch.num_device_rows].tolist()))
    rows = zip(
        batch.slots.tolist(), batch.starts.tolist(), batch.num_new_tokens.tolist(), batch.samples.tolist(), strict=True
    )
    prefill = " ".join(
        f"{slot}@{start}+{count}{'*' if samples else ''}"
        for slot, start, count, samples in list(rows)[batch.num_device_rows :]
    )
    return f"decode {decode or '-'} | prefill {prefill or '-'}"


def replay(trace: dict[str, Any]) -> str:
    """One line a step: the batch, then the state after it."""
    engine = make_engine(**trace["engine"])
    launch, lines, batches = engine.runner.launch, [], []

    def recording(batch: ScheduledBatch, watch: Watch) -> Launched:
        batches.append(describe(batch))
        return launch(batch, watch)

    engine.runner.launch = recording  # type: ignore[method-assign]
    events = trace["events"]
    step = 0
    while events or engine.has_work:
        while events and events[0]["step"] <= step:
            event, *events = events
            if "abort" in event:
                engine.abort(event["abort"])
            else:
                prompt = [*range(1, 1 + event["shared"]), *([50 + event["own"] % 40] * event["own"])]
                engine.add_request(make_request(event["id"], prompt, max_tokens=event["max_tokens"]))
        record = engine.step().record
        assert_invariants(engine.scheduler)
        lines.append(
            f"{step:3} {batches.pop() if batches else 'idle'} | run {record.num_running} wait {record.num_waiting} "
            f"used {record.num_used_blocks} cached {record.num_cached_blocks} preempted {record.num_preemptions}"
        )
        step += 1
    return "\n".join(lines) + "\n"


def test_the_recorded_trace_gives_the_same_batches() -> None:
    trace = json.loads((GOLDEN / "trace.json").read_text())
    batches = replay(trace)
    assert batches == (GOLDEN / "batches.txt").read_text()
    words = ("preempted 1", "decode 0,", "*", "prefill -")
    assert all(word in batches for word in words), "the trace no longer exercises what it was recorded for"


if __name__ == "__main__":
    (GOLDEN / "batches.txt").write_text(replay(json.loads((GOLDEN / "trace.json").read_text())))
