"""Recordings that tests make by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from roseinfer.observe.recording import (
    INTERRUPTION_DTYPE,
    STEP_DTYPE,
    WRITE_DTYPE,
    ClockPair,
    Recording,
    RecordingMeta,
    RequestRecord,
    step_row,
)
from roseinfer.records import StepRecord
from tests.unit.observe.facts import ENGINE


def make_recording(requests: Sequence[RequestRecord], steps: Sequence[StepRecord] = (), **meta: Any) -> Recording:
    fields: dict[str, Any] = {"version": "1.2.3", "model_name": "m", "clock": ClockPair(1, 2), "engine": ENGINE}
    return Recording(
        meta=RecordingMeta(**(fields | meta)),
        requests=list(requests),
        steps=np.array([step_row(step) for step in steps], STEP_DTYPE),
        writes=np.zeros(0, WRITE_DTYPE),
        interruptions=np.zeros(0, INTERRUPTION_DTYPE),
    )
