"""Gaps with known parts, and a recording around them, for the tests of explanations."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from roseinfer.observe.causes import Gap
from roseinfer.observe.recording import (
    CAUSES,
    INTERRUPTION_DTYPE,
    STEP_DTYPE,
    WRITE_DTYPE,
    ClockPair,
    Recording,
    RecordingMeta,
    RequestRecord,
    step_row,
)
from roseinfer.records import Cause, StepRecord
from tests.unit.observe.facts import ENGINE

MS = 1_000_000


def make_gap(parts_ms: dict[Cause, float], *, serial: int = 0, end_ms: float = 1000.0, step_id: int = 1) -> Gap:
    """A gap that ends then; its cause is the largest part that is not decode, if it has one."""
    parts = {cause: int(part * MS) for cause, part in parts_ms.items()}
    end_ns, duration_ns = int(end_ms * MS), sum(parts.values())
    others = {cause: part for cause, part in parts.items() if cause is not Cause.DECODE} or parts
    cause = max(others, key=lambda cause: others[cause])
    return Gap(serial, 1, end_ns - duration_ns, end_ns, step_id, parts, cause, len(others) < len(parts))


def make_recording(
    requests: Sequence[RequestRecord] = (),
    steps: Sequence[StepRecord] = (),
    interruptions: Sequence[tuple[int, int, Cause]] = (),
    config: dict[str, Any] | None = None,
) -> Recording:
    rows = [(start_ns, end_ns, CAUSES.index(cause)) for start_ns, end_ns, cause in interruptions]
    return Recording(
        meta=RecordingMeta(
            version="1.2.3", model_name="tiny", clock=ClockPair(1, 2), engine=ENGINE, config=config or {}
        ),
        requests=list(requests),
        steps=np.array([step_row(step) for step in steps], STEP_DTYPE),
        writes=np.zeros(0, WRITE_DTYPE),
        interruptions=np.array(rows, INTERRUPTION_DTYPE),
    )
