"""Recordings that tests make by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.recorder.recording import (
    INTERRUPTION_DTYPE,
    STEP_DTYPE,
    ClockPair,
    Recording,
    RecordingMeta,
    RequestRecord,
    step_row,
)
from roseinfer.records import StepRecord
from tests.unit.observe.facts import ENGINE


def make_recording(
    requests: Sequence[RequestRecord] = (),
    steps: Sequence[StepRecord] = (),
    interruptions: Sequence[tuple[int, int, Cause]] = (),
    **meta: Any,
) -> Recording:
    fields: dict[str, Any] = {"version": "1.2.3", "model_name": "m", "clock": ClockPair(1, 2), "engine": ENGINE}
    rows = [(start_ns, end_ns, cause.number) for start_ns, end_ns, cause in interruptions]
    return Recording(
        meta=RecordingMeta(**(fields | meta)),
        requests=list(requests),
        steps=np.array([step_row(step) for step in steps], STEP_DTYPE),
        interruptions=np.array(rows, INTERRUPTION_DTYPE),
    )
