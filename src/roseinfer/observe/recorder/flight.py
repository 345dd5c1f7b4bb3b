"""Answers `/debug/*`: steps, requests, recordings, traces and the timeline page's data."""

import io
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from roseinfer.config.options import Config
from roseinfer.observe.gaps import intervals
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.interruptions import LiveInterruptions, hear_interruptions
from roseinfer.observe.gaps.request_gaps import gaps_of
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.observe.recorder.chrome_trace import chrome_trace
from roseinfer.observe.recorder.recorder import FlightRecorder, Snapshot
from roseinfer.observe.recorder.recording import (
    ClockPair,
    Recording,
    RequestRecord,
    StructArray,
    refusing_contradictions,
    step_of,
)
from roseinfer.observe.recorder.timeline_view import CONTEXT_STEPS, Cursor, timeline_json
from roseinfer.records import MAX_PREFIX_WAIT_STEPS, BlockedBy, QueueReport, RequestTimeline, StepRecord
from roseinfer.runtime.cpu_waits import LoopWaits
from roseinfer.runtime.gc_pauses import GcPauses

MAX_VIEWED_STEPS = 3000  # of a saved recording, its newest: with 64 requests that is 20 MB of gaps
_NS_PER_MS = 1e6
_STAMPS = ("request_id", "recv_ns", "parsed_ns", "tokenized_ns", "inbox_ns", "scheduled_ns", "token_ns", "end_ns")
_NOTHING_HELD = (
    "No limit held anything back in the last step: its turn comes next, once its grammar is compiled if it has one."
)


class Flight(FlightRecorder):
    """The recorder, and the answers of `/debug/*` from what it remembers."""

    def __init__(self, config: Config, version: str) -> None:
        super().__init__(config, version)
        self.max_steps = config.observe.recorder_steps
        self.catch_up: Callable[[], None] = lambda: None  # delivers facts that wait, before each answer
        self.queue: Callable[[], QueueReport] = QueueReport  # reports the requests that wait; set by the wiring
        self._origin_ns = time.monotonic_ns()

    def listen(
        self, gc_pauses: GcPauses, loop_waits: LoopWaits, metrics: Metrics, interruptions: LiveInterruptions
    ) -> None:
        """Records what interrupts the front end, and adds it to `interruptions`."""

        def note_scrape(start_ns: int, end_ns: int) -> None:
            self.note_interruption(Cause.SCRAPE, start_ns, end_ns)
            interruptions.add(start_ns, end_ns, Cause.SCRAPE)

        hear_interruptions(gc_pauses, loop_waits, interruptions, self.note_interruption)
        metrics.render_start_listeners.append(partial(interruptions.begin, cause=Cause.SCRAPE))
        metrics.render_listeners.append(note_scrape)

    # --- answers ----------------------------------------------------------------------------------------------------

    def steps(self, limit: int) -> Callable[[], bytes]:
        self.catch_up()
        return partial(_steps_json, self._steps.newest(limit), self.clock_pair)

    def recording(self, since_ns: int = 0) -> Callable[[], bytes]:
        self.catch_up()
        return partial(_archive_of, self.snapshot_since(since_ns))

    def trace(self, limit: int) -> Callable[[], bytes]:
        self.catch_up()
        snapshot = self.snapshot(limit)

        def render() -> bytes:
            recording = snapshot.recording()
            return chrome_trace(recording, gaps_of(recording))

        return render

    def timeline(self, limit: int, since_step: int, since_ns: int) -> Callable[[], bytes]:
        self.catch_up()
        last = self.last_step
        num_steps = min(limit, max(0, (last.step_id if last else 0) - since_step))
        since = Cursor(since_step, since_ns)
        snapshot = self.snapshot(num_steps + CONTEXT_STEPS)
        return lambda: timeline_json(snapshot.recording(), gaps_of, self._origin_ns, num_steps, since)

    def view(self, content: bytes) -> bytes:
        """Returns the page's data of a saved recording. Raises InvalidRequest for bytes that are none."""
        recording = Recording.read(io.BytesIO(content))
        with refusing_contradictions("The file"):
            return timeline_json(recording, gaps_of, recording.first_ns, MAX_VIEWED_STEPS)

    def requests(self) -> dict[str, Any]:
        """Lists requests in flight, in the order of arrival, with the places of those that wait."""
        self.catch_up()
        queue, step, now_ns = self.queue(), self.last_step, self.clock_pair.monotonic_ns
        places = {request_id: place for place, request_id in enumerate(queue.waiting)}
        return {
            "now_ns": now_ns,
            "num_waiting": 0 if step is None else step.num_waiting,
            "is_place_exact": queue.is_order_exact,
            "requests": [
                {
                    "id": timeline.request_id,
                    "stage": _stage_in(timeline, queue),
                    "age_ms": (now_ns - timeline.recv_ns) / _NS_PER_MS,
                    "num_prompt_tokens": timeline.num_prompt_tokens,
                    "num_generated_tokens": len(timeline.token_ns),
                    "max_tokens": timeline.max_tokens,
                    "place": places.get(timeline.request_id),
                }
                for timeline in self.in_flight
            ],
        }

    def request(self, request_id: str) -> dict[str, Any] | None:
        """Describes a request in full, and why it waits if it does; None for an unknown one."""
        self.catch_up()
        record, queue, now_ns = self.find(request_id), self.queue(), self.clock_pair.monotonic_ns
        if record is None:
            return None
        timeline = RequestTimeline(
            **{name: getattr(record, name) for name in _STAMPS},
            write_ns=[record.first_write_ns] if record.first_write_ns else [],
        )
        remembered = replace(timeline, write_ns=self.writes_of(record.serial)["written_ns"].tolist())
        return {
            "id": request_id,
            "stage": _stage_in(record, queue),
            "age_ms": ((record.end_ns or now_ns) - record.recv_ns) / _NS_PER_MS,
            "times_ms": _times(timeline, now_ns),
            "time_to_first_token_ms": _ms(intervals.time_to_first_token_ns(timeline)),
            "time_per_output_token_ms": _ms(intervals.time_per_output_token_ns(timeline)),
            "longest_write_gap_ms": _ms(max(intervals.stream_gaps_ns(remembered), default=None)),
            "num_prompt_tokens": record.num_prompt_tokens,
            "num_cached_tokens": record.num_cached_tokens,
            "num_generated_tokens": len(record.token_ns),
            "max_tokens": record.max_tokens,
            "num_preemptions": record.num_preemptions,
            "is_streamed": record.is_streamed,
            "finish_reason": record.finish_reason,
            "error_code": record.error_code or None,
            "waiting": self._waiting(request_id, queue),
        }

    def _waiting(self, request_id: str, queue: QueueReport) -> dict[str, Any] | None:
        if request_id not in queue.waiting:
            return None
        step, estimate = self.last_step, queue.waiting[request_id]
        limit = None if step is None else limit_of(step, self.config)
        return {
            "num_before": list(queue.waiting).index(request_id),
            "is_place_exact": queue.is_order_exact,
            "blocked_by": step.blocked_by if step is not None else BlockedBy.NOTHING,
            "option": limit.option if limit else None,
            "value": limit.value if limit else None,
            "sentence": limit.sentence if limit else _NOTHING_HELD,
            "estimate": msgspec.structs.asdict(estimate) if estimate else None,
        }


def _steps_json(rows: StructArray, clock: ClockPair) -> bytes:
    steps = [
        msgspec.structs.asdict(step)
        | {"kind": step.kind}
        | {"phases": msgspec.structs.asdict(step.phases), "ahead": msgspec.structs.asdict(step.ahead)}
        for step in map(step_of, rows)
    ]
    return msgspec.json.encode({"clock": clock, "steps": steps})


def _archive_of(snapshot: Snapshot) -> bytes:
    file = io.BytesIO()
    snapshot.recording().write(file)
    return file.getvalue()


# --- what a request is doing ------------------------------------------------------------------------------------------


def stage_of(timeline: RequestTimeline | RequestRecord) -> str:
    """Returns the stage of a request, as far as the front end sees it."""
    if timeline.end_ns:
        return "finished"
    if timeline.token_ns:
        return "finishing" if timeline.finish_reason else "decoding"
    if timeline.finish_reason:
        return "finishing"
    if not timeline.parsed_ns:
        return "receiving"
    if not timeline.tokenized_ns or not timeline.max_tokens:
        return "tokenizing"
    return "in_engine"


@dataclass(frozen=True, slots=True)
class Limit:
    """The option that keeps requests waiting, and its value; of a time, what that lets into a step."""

    option: str
    value: int
    sentence: str


def limit_of(step: StepRecord, config: Config) -> Limit | None:
    """Finds the limit that kept the first waiting request out of a step; None when none did."""
    limits, waiting = config.scheduler.limits, "The first waiting request was left out of the last step because"
    left = limits.max_num_batched_tokens - step.num_decode_seqs
    match step.blocked_by:
        case BlockedBy.NOTHING:
            return None
        case BlockedBy.TOKEN_BUDGET if limits.max_prefill_tokens < left:
            option, value = "scheduler.max_prefill_tokens", limits.max_prefill_tokens
            reason = f"the prompts before it took the {value} prompt tokens that a step may compute"
        case BlockedBy.TOKEN_BUDGET if step.num_prefill_tokens < left:
            option, value = "scheduler.target_itl_ms", step.num_prefill_tokens
            reason = (
                f"the prompts before it took the {value} prompt tokens that fit beside {step.num_decode_seqs} decoding "
                f"sequences"
            )
        case BlockedBy.TOKEN_BUDGET:
            option, value = "scheduler.max_num_batched_tokens", limits.max_num_batched_tokens
            reason = (
                f"{step.num_decode_seqs} decoding sequences and {step.num_prefill_tokens} prompt tokens took the "
                f"budget of {value} tokens a step"
            )
        case BlockedBy.PREFILL_SEQS:
            option, value = config.scheduler.option_of("max_prefill_seqs"), limits.max_prefill_seqs
            reason = f"{value} requests were admitted before it, which is the most for one step"
        case BlockedBy.SLOTS:
            option, value = config.scheduler.option_of("max_active_seqs"), limits.max_active_seqs
            reason = f"all {value} places of active sequences are taken"
        case BlockedBy.KV_BLOCKS:
            option, value = "cache.num_blocks", step.num_total_blocks
            reason = f"of the {value} KV blocks {step.num_used_blocks} are in use and the rest is too little for it"
        case BlockedBy.PREFIX:
            option, value = config.scheduler.option_of("max_prefill_tokens"), limits.max_prefill_tokens
            reason = (
                f"another request is computing the prefix that it needs, {value} tokens a step at most; it waits "
                f"{MAX_PREFIX_WAIT_STEPS} steps for that at most"
            )
    return Limit(option, value, f"{waiting} {reason}.")


def _stage_in(timeline: RequestTimeline | RequestRecord, queue: QueueReport) -> str:
    stage = stage_of(timeline)
    if stage != "in_engine":
        return stage
    return "waiting" if timeline.request_id in queue.waiting else "prefilling"


def _times(timeline: RequestTimeline, now_ns: int) -> dict[str, float]:
    """Returns the milliseconds of each part that is over, and `under_way` since the last stamp of one in flight."""
    reached = [(name, end - start) for name, start, end in intervals.stages(timeline, until_ns=0) if end]
    parts = {name: length_ns / _NS_PER_MS for name, length_ns in reached}
    if (first_write_ns := intervals.first_write_ns(timeline)) is not None:
        parts["first_write"] = first_write_ns / _NS_PER_MS
    if not timeline.end_ns:
        stamps = (timeline.recv_ns, timeline.parsed_ns, timeline.tokenized_ns, *timeline.token_ns[-1:])
        parts["under_way"] = (now_ns - max(stamps)) / _NS_PER_MS
    return parts


def _ms(length_ns: float | None) -> float | None:
    return None if length_ns is None else length_ns / _NS_PER_MS
