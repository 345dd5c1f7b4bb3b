"""Writes what the timeline page draws of a recording, as JSON; with a cursor, only what is new.

Times are nanoseconds since an origin, so that they are exact as JavaScript's numbers. Steps and gaps are rows, to be
read with the lists of names beside them: a page of 500 steps by 64 requests has 30,000 gaps.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from roseinfer.observe.gaps.causes import CAUSES
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.recorder.recording import BLOCKED_BY, Recording, RequestRecord, StructArray

CONTEXT_STEPS = 1024  # before those that are shown: from them it is known what steps cost, and what late writes carry
_NUM_LESSONS = 512  # gaps before those that are shown, from which it is known what is usual
_STEP_STAMPS = ("start_ns", "tokens_ns", "end_ns")
_STEP_FIELDS = (
    *("step_id", *_STEP_STAMPS, "num_running", "num_waiting", "num_decode_seqs", "num_prefill_seqs"),
    *("num_prefill_tokens", "num_generated_tokens", "num_not_selected", "num_preemptions", "num_finished"),
    *("num_draft_tokens", "num_accepted_tokens"),
    *("num_used_blocks", "num_cached_blocks", "num_total_blocks", "outbox_depth", "outbox_wait_ns", "gc_ns"),
    *("h2d_bytes", "graph_rows", "schedule_ns", "launch_ns", "wait_ns", "commit_ns", "stage_ns", "h2d_ns"),
    *("capture_ns", "forward_ns", "sample_ns", "blocked_by"),
)
_GAP_FIELDS = ("serial", "index", "start_ns", "end_ns", "step_id", "cause", "is_slow", "parts")
_REQUEST_STAMPS = ("recv_ns", "parsed_ns", "tokenized_ns", "inbox_ns", "scheduled_ns", "end_ns", "preempted_ns")
_REQUEST_COUNTS = ("num_prompt_tokens", "num_cached_tokens", "max_tokens", "num_preemptions", "error_code")
_LATE_NS = 2_000_000_000  # a request may be sent that long after its end: the page knows it by its serial

GapsOf = Callable[[Recording], Sequence[Gap]]


class Cursor(msgspec.Struct, frozen=True):
    """What a page knows: all steps up to `step_id`, and all that ended by `now_ns` (since the origin)."""

    step_id: int = 0
    now_ns: int = 0


def timeline_json(
    recording: Recording, gaps_of: GapsOf, origin_ns: int, num_steps: int, since: Cursor | None = None
) -> bytes:
    """Returns the page's data: the newest `num_steps` steps and what happened meanwhile, less what the cursor knows.

    Without a cursor it is of a saved recording. What comes before the steps is context for the causes.
    """
    cursor, all_steps = since or Cursor(), recording.steps
    num_before = max(0, len(all_steps) - num_steps)
    steps = all_steps[num_before:]
    before_id, known_ns = cursor.step_id, 0
    if num_before:
        before_id, known_ns = int(all_steps["step_id"][num_before - 1]), int(all_steps["tokens_ns"][num_before - 1])
    seen_ns = cursor.now_ns + origin_ns if cursor.now_ns else known_ns
    gaps = gaps_of(_with_lessons(recording, num_before))
    now_ns = recording.meta.clock.monotonic_ns
    first_writes = _first_writes(recording)
    data: dict[str, Any] = {
        "meta": _meta(recording, origin_ns, is_live=since is not None),
        "now_ns": now_ns - origin_ns,
        "next": {"since": int(all_steps["step_id"][-1]) if len(all_steps) else 0, "since_ns": now_ns - origin_ns},
        "step_fields": _STEP_FIELDS,
        "steps": _step_rows(steps, origin_ns),
        "requests": [
            _request(request, origin_ns, known_ns, request.first_write_ns or first_writes.get(request.serial, 0))
            for request in recording.requests
            if not request.end_ns or request.end_ns > seen_ns - _LATE_NS
        ],
        "gap_fields": _GAP_FIELDS,
        "gaps": [
            _gap_row(gap, origin_ns)
            for gap in gaps
            if gap.step_id > before_id or (cursor.now_ns and gap.end_ns > seen_ns)
        ],
        "interruptions": [
            [int(row["start_ns"]) - origin_ns, int(row["end_ns"]) - origin_ns, int(row["cause"])]
            for row in recording.interruptions
            if row["end_ns"] > seen_ns
        ],
    }
    return msgspec.json.encode(data)


def _with_lessons(recording: Recording, num_before: int) -> Recording:
    """Returns the recording with fewer writes: of a request's writes long before the shown steps, only the last.

    To name the cause of a gap takes some 15 microseconds, and the page asks every second.
    """
    made = recording.steps["num_generated_tokens"][:num_before][::-1].cumsum()
    num_lessons = int(np.searchsorted(made, _NUM_LESSONS)) + 1
    if num_lessons >= num_before:
        return recording
    cut_ns = recording.steps["tokens_ns"][num_before - num_lessons]
    cut = int(np.searchsorted(recording.writes["written_ns"], cut_ns))
    early, late = recording.writes[:cut][::-1], recording.writes[cut:]
    _, last = np.unique(early["serial"], return_index=True)
    return replace(recording, writes=np.concatenate((early[np.sort(last)[::-1]], late)))


def _first_writes(recording: Recording) -> dict[int, int]:
    """Returns serial -> the first write that is remembered of each request: the first of all, if none is forgotten."""
    serials, rows = np.unique(recording.writes["serial"], return_index=True)
    return dict(zip(serials.tolist(), recording.writes["written_ns"][rows].tolist(), strict=True))


def _meta(recording: Recording, origin_ns: int, *, is_live: bool) -> dict[str, Any]:
    meta = recording.meta
    engine = meta.engine
    return {
        "is_live": is_live,
        "run": str(origin_ns),  # of the server: after a restart a page begins anew
        "origin_unix_ms": (meta.clock.unix_ns - meta.clock.monotonic_ns + origin_ns) / 1e6,
        "version": meta.version,
        "model_name": meta.model_name,
        "device": engine.device if engine else "",
        "dtype": engine.dtype if engine else "",
        "trigger": meta.trigger,
        "scheduler": meta.config.get("scheduler", {}),
        "causes": CAUSES,
        "limits": BLOCKED_BY,
    }


def _step_rows(steps: StructArray, origin_ns: int) -> list[tuple[int, ...]]:
    table = steps[list(_STEP_FIELDS)].copy()
    for name in _STEP_STAMPS:
        table[name] -= origin_ns
    rows: list[tuple[int, ...]] = table.tolist()
    return rows


def _request(request: RequestRecord, origin_ns: int, known_ns: int, first_write_ns: int) -> dict[str, Any]:
    tokens_from = bisect_right(request.token_ns, known_ns)
    stamps = {name: (stamp - origin_ns if (stamp := getattr(request, name)) else None) for name in _REQUEST_STAMPS}
    return {
        "serial": request.serial,
        "id": request.request_id,
        **stamps,
        **{name: getattr(request, name) for name in _REQUEST_COUNTS},
        "is_streamed": request.is_streamed,
        "finish_reason": request.finish_reason,
        "first_write_ns": first_write_ns - origin_ns if first_write_ns else None,
        "num_tokens": len(request.token_ns),
        "first_token_ns": request.token_ns[0] - origin_ns if request.token_ns else None,
        "tokens_from": tokens_from,
        "token_ns": [stamp - origin_ns for stamp in request.token_ns[tokens_from:]],
    }


def _gap_row(gap: Gap, origin_ns: int) -> tuple[Any, ...]:
    """Returns a row whose parts are flat: cause, nanoseconds, cause, nanoseconds."""
    parts = [number for cause, length_ns in gap.parts.items() for number in (cause.number, length_ns)]
    stamps = (gap.start_ns - origin_ns, gap.end_ns - origin_ns)
    return (gap.serial, gap.index, *stamps, gap.step_id, gap.cause.number, int(gap.is_slow), parts)
