"""Writes a recording as the JSON that Perfetto and chrome://tracing open.

The format is Chrome's Trace Event Format: complete events (`ph` X) with times in microseconds, metadata events (M) that
name processes and threads, flow events (s, f) from a step to the first tokens that it made.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from roseinfer.observe.gaps.causes import CAUSES
from roseinfer.observe.gaps.intervals import stages, step_phases
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.recorder.recording import Recording, RequestRecord, step_of
from roseinfer.records import StepRecord

ENGINE, FRONT_END, REQUESTS, GAPS = 1, 2, 3, 4  # "processes" of the trace

Event = dict[str, Any]


def chrome_trace(recording: Recording, gaps: Sequence[Gap] = ()) -> bytes:
    """Returns the trace of a recording; times count from its first stamp."""
    origin_ns = recording.first_ns
    steps = [step_of(row) for row in recording.steps]
    events = [*_names(recording, steps), *_steps(steps), *_interruptions(recording)]
    lanes = assign_lanes(recording.requests)
    for request in recording.requests:
        events += _request(request, lanes[request.serial])
    events += _flows(recording.requests, lanes, steps)
    for gap in gaps:
        if gap.serial in lanes:
            events.append(_gap(gap, lanes[gap.serial]))
    for event in events:
        if "ts" in event:
            event["ts"] = (event["ts"] - origin_ns) / 1e3
        if "dur" in event:
            event["dur"] = max(0, event["dur"]) / 1e3
    other = {"version": recording.meta.version, "model": recording.meta.model_name, "origin_monotonic_ns": origin_ns}
    return msgspec.json.encode({"displayTimeUnit": "ms", "otherData": other, "traceEvents": events})


def assign_lanes(requests: Sequence[RequestRecord]) -> dict[int, int]:
    """Returns serial -> lane, from 0: the first lane that is free when the request comes."""
    free_ns: list[int] = []  # per lane: the end of its last request
    lanes: dict[int, int] = {}
    for request in requests:
        end_ns = request.end_ns or 2**63
        lane = next((lane for lane, until_ns in enumerate(free_ns) if until_ns <= request.recv_ns), len(free_ns))
        free_ns[lane : lane + 1] = [end_ns]
        lanes[request.serial] = lane
    return lanes


def _names(recording: Recording, steps: Sequence[StepRecord]) -> Iterator[Event]:
    for pid, name in ((ENGINE, "engine"), (FRONT_END, "front end"), (REQUESTS, "requests"), (GAPS, "gaps")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for track in range(max((step.pipeline_depth for step in steps), default=0) + 1):
        yield {"ph": "M", "name": "thread_name", "pid": ENGINE, "tid": track, "args": {"name": f"steps {track}"}}
    for cause in {CAUSES[int(index)] for index in recording.interruptions["cause"]}:
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": FRONT_END,
            "tid": cause.number,
            "args": {"name": cause.value},
        }


def _steps(steps: Sequence[StepRecord]) -> Iterator[Event]:
    """Yields steps and their phases; steps that overlap are on tracks of their own."""
    for step in steps:
        track = step.step_id % (step.pipeline_depth + 1)
        facts = {
            name: value
            for name in ("num_decode_seqs", "num_prefill_seqs", "num_prefill_tokens", "num_waiting", "graph_rows")
            if (value := getattr(step, name))
        }
        arguments = {"step_id": step.step_id, "blocked_by": step.blocked_by, **facts}
        yield _complete(f"step {step.step_id} {step.kind}", ENGINE, track, step.start_ns, step.end_ns, arguments)
        for name, start_ns, end_ns in step_phases(step):
            if end_ns > start_ns:
                yield _complete(name, ENGINE, track, start_ns, end_ns, {"step_id": step.step_id})


def _interruptions(recording: Recording) -> Iterator[Event]:
    for row in recording.interruptions:
        cause = CAUSES[int(row["cause"])]
        yield _complete(
            cause.value, FRONT_END, cause.number, int(row["start_ns"]), int(row["end_ns"]), {"cause": cause}
        )


def _request(request: RequestRecord, lane: int) -> Iterator[Event]:
    tokens = request.token_ns
    end_ns = request.end_ns or max([request.recv_ns, request.scheduled_ns, *tokens[-1:]])
    arguments = {
        "request_id": request.request_id,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_generated_tokens": len(tokens),
        "finish_reason": request.finish_reason,
    }
    yield _complete(request.request_id, REQUESTS, lane, request.recv_ns, end_ns, arguments)
    for name, start_ns, stop_ns in stages(request, until_ns=0):
        if stop_ns > start_ns:
            yield _complete(
                name.replace("_", " "), REQUESTS, lane, start_ns, stop_ns, {"request_id": request.request_id}
            )


def _flows(requests: Sequence[RequestRecord], lanes: dict[int, int], steps: Sequence[StepRecord]) -> Iterator[Event]:
    """Yields an arrow from a step to each request whose first token it made."""
    by_tokens_ns = {step.tokens_ns: step for step in steps}
    for request in requests:
        step = by_tokens_ns.get(request.token_ns[0]) if request.token_ns else None
        if step is not None:
            flow = {"cat": "token", "name": "first token", "id": request.serial}
            track = step.step_id % (step.pipeline_depth + 1)
            yield flow | {"ph": "s", "pid": ENGINE, "tid": track, "ts": step.start_ns}
            yield flow | {"ph": "f", "bp": "e", "pid": REQUESTS, "tid": lanes[request.serial], "ts": step.tokens_ns}


def _gap(gap: Gap, lane: int) -> Event:
    parts = {f"{cause}_ms": length_ns / 1e6 for cause, length_ns in gap.parts.items()}
    arguments = {"step_id": gap.step_id, "index": gap.index, "cause": gap.cause, "is_slow": gap.is_slow, **parts}
    name = f"gap: {gap.cause}" if gap.is_slow else "gap"
    return _complete(name, GAPS, lane, gap.start_ns, gap.end_ns, arguments)


def _complete(name: str, pid: int, tid: int, start_ns: int, end_ns: int, arguments: dict[str, Any]) -> Event:
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start_ns,
        "dur": end_ns - start_ns,
        "args": arguments,
    }
