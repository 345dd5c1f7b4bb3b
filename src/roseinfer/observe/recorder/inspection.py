"""The answers of `/debug/requests`: requests in flight and remembered ones, and why one waits."""

from dataclasses import dataclass
from typing import Any

import msgspec

from roseinfer.config.tree import Config
from roseinfer.observe.gaps import intervals
from roseinfer.observe.recorder.recorder import FlightRecorder
from roseinfer.observe.recorder.recording import RequestRecord
from roseinfer.records import MAX_PREFIX_WAIT_STEPS, BlockedBy, QueueReport, RequestTimeline, StepRecord

_NS_PER_MS = 1e6


def stage_of(timeline: RequestTimeline | RequestRecord) -> str:
    """The stage of a request, as far as the front end sees it."""
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
    """The option that keeps requests waiting, and its value."""

    option: str
    value: int
    sentence: str


def limit_of(step: StepRecord, config: Config) -> Limit | None:
    """Find the limit that kept the first waiting request out of a step; None when none did."""
    limits, waiting = config.scheduler.limits, "The first waiting request was left out of the last step because"
    left = limits.max_num_batched_tokens - step.num_decode_seqs
    match step.blocked_by:
        case BlockedBy.NOTHING:
            return None
        case BlockedBy.TOKEN_BUDGET if limits.max_prefill_tokens < left:
            option, value = "scheduler.max_prefill_tokens", limits.max_prefill_tokens
            reason = f"the prompts before it took the {value} prompt tokens that a step may compute"
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


class Inspection:
    """Describes requests from what the recorder holds and what the engine's client reports of the queue."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder

    def list(self, queue: QueueReport) -> dict[str, Any]:
        """Requests in flight, in the order of arrival, and whether the places of those that wait are exact."""
        now_ns = self._recorder.clock_pair.monotonic_ns
        places = {request_id: place for place, request_id in enumerate(queue.waiting)}
        step = self._recorder.last_step
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
                for timeline in self._recorder.in_flight
            ],
        }

    def show(self, request_id: str, queue: QueueReport) -> dict[str, Any] | None:
        """Describe a request in full, and why it waits if it does; None for an unknown one."""
        record = self._recorder.find(request_id)
        if record is None:
            return None
        now_ns = self._recorder.clock_pair.monotonic_ns
        timeline = self._timeline_of(record)
        gaps = intervals.stream_gaps_ns(timeline)
        per_token_ns = intervals.time_per_output_token_ns(timeline)
        return {
            "id": request_id,
            "stage": _stage_in(record, queue),
            "age_ms": ((record.end_ns or now_ns) - record.recv_ns) / _NS_PER_MS,
            "times_ms": _times(timeline, now_ns),
            "time_to_first_token_ms": _ms(intervals.time_to_first_token_ns(timeline)),
            "time_per_output_token_ms": None if per_token_ns is None else per_token_ns / _NS_PER_MS,
            "longest_write_gap_ms": max(gaps) / _NS_PER_MS if gaps else None,
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

    def _timeline_of(self, record: RequestRecord) -> RequestTimeline:
        writes = self._recorder.writes_of(record.serial)
        return RequestTimeline(
            request_id=record.request_id,
            recv_ns=record.recv_ns,
            parsed_ns=record.parsed_ns,
            tokenized_ns=record.tokenized_ns,
            inbox_ns=record.inbox_ns,
            scheduled_ns=record.scheduled_ns,
            token_ns=record.token_ns,
            write_ns=writes["written_ns"].tolist(),
            end_ns=record.end_ns,
        )

    def _waiting(self, request_id: str, queue: QueueReport) -> dict[str, Any] | None:
        if request_id not in queue.waiting:
            return None
        step = self._recorder.last_step
        limit = None if step is None else limit_of(step, self._recorder.config)
        estimate = queue.waiting[request_id]
        sentence = limit.sentence if limit else "No limit held anything back in the last step: its turn comes next."
        return {
            "num_before": list(queue.waiting).index(request_id),
            "is_place_exact": queue.is_order_exact,
            "blocked_by": step.blocked_by if step is not None else BlockedBy.NOTHING,
            "option": limit.option if limit else None,
            "value": limit.value if limit else None,
            "sentence": sentence,
            "estimate": msgspec.structs.asdict(estimate) if estimate else None,
        }


def _stage_in(timeline: RequestTimeline | RequestRecord, queue: QueueReport) -> str:
    stage = stage_of(timeline)
    if stage != "in_engine":
        return stage
    return "waiting" if timeline.request_id in queue.waiting else "prefilling"


def _times(timeline: RequestTimeline, now_ns: int) -> dict[str, float]:
    """Milliseconds of each part that is over; `under_way` is what has passed since the last stamp of one in flight."""
    reached = [(name, end - start) for name, start, end in intervals.stages(timeline, until_ns=0) if end]
    parts = {name: length_ns / _NS_PER_MS for name, length_ns in reached}
    if (first_write_ns := intervals.first_write_ns(timeline)) is not None:
        parts["first_write"] = first_write_ns / _NS_PER_MS
    if not timeline.end_ns:
        stamps = (timeline.recv_ns, timeline.parsed_ns, timeline.tokenized_ns, *timeline.token_ns[-1:])
        parts["under_way"] = (now_ns - max(stamps)) / _NS_PER_MS
    return parts


def _ms(length_ns: int | None) -> float | None:
    return None if length_ns is None else length_ns / _NS_PER_MS
