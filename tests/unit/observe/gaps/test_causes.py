"""Each row of the table of causes is whole, and recordings keep their meaning."""

import string

import pytest

from roseinfer.config.options import options
from roseinfer.observe.gaps.causes import CAUSES, Cause
from roseinfer.observe.recorder.recording import STEP_DTYPE
from roseinfer.records import StepRecord


@pytest.mark.parametrize("cause", Cause)
def test_a_row_names_what_exists(cause: Cause) -> None:
    row = cause.row
    assert row.option in {"", *options()}
    assert row.column in {"", *(STEP_DTYPE.names or ())}
    fields = {name for _, name, _, _ in string.Formatter().parse(row.story) if name}
    assert fields <= {"names", "part", "process", *(f"step.{name}" for name in StepRecord.__struct_fields__)}


def test_a_name_finds_its_cause() -> None:
    assert Cause("gc") is Cause.GC
    assert f"{Cause.GC}" == "gc"
    with pytest.raises(ValueError, match="'nothing' is not a valid Cause"):
        Cause("nothing")


def test_numbers_in_recordings_stay() -> None:
    """Older recordings have these; a new cause comes after them."""
    known = (
        *("decode", "prefill_of_others", "batch_growth", "graph_capture", "graph_miss", "h2d_copy", "sample_sync"),
        *("schedule", "kv_wait", "preempted", "not_selected", "gc", "engine_outbox", "detokenize", "event_loop"),
        *("client_backpressure", "scrape", "profiler", "unknown"),
    )
    assert CAUSES[: len(known)] == known
    assert [cause.number for cause in CAUSES] == list(range(len(CAUSES)))
