"""Requests in flight and remembered ones into what an operator is told of each. Knows no HTTP and no text."""

from dataclasses import asdict
from typing import Any

from roseinfer.observe.gaps import intervals
from roseinfer.observe.queue_estimate import QueueDrain, limit_of
from roseinfer.observe.recorder.recorder import FlightRecorder
from roseinfer.observe.recorder.recording import RequestRecord
from roseinfer.records import BlockedBy, RequestTimeline

_NS_PER_MS = 1e6
_NS_PER_S = 1_000_000_000
_PARTS = (
    ("receive", intervals.receive_ns),
    ("tokenize", intervals.tokenize_ns),
    ("submit_lag", intervals.submit_lag_ns),
    ("queue_wait", intervals.queue_wait_ns),
    ("prefill", intervals.prefill_ns),
    ("first_write", intervals.first_write_ns),
)


def stage_of(timeline: RequestTimeline | RequestRecord) -> str:
    """Where a request is, as far as the front end knows."""
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


class Inspection:
    """Answers about requests, from what the recorder holds and the queue has shown."""

    def __init__(self, recorder: FlightRecorder, drain: QueueDrain) -> None:
        self._recorder = recorder
        self._drain = drain

    def list(self) -> dict[str, Any]:
        """Requests in flight, in the order of arrival, and whether the places of those that wait are exact."""
        now_ns = self._recorder.clock_pair.monotonic_ns
        places = self._places()
        return {
            "now_ns": now_ns,
            "num_waiting": self._num_waiting(),
            "is_place_exact": self._is_place_exact,
            "requests": [
                {
                    "id": timeline.request_id,
                    "stage": self._stage(timeline, places),
                    "age_ms": (now_ns - timeline.recv_ns) / _NS_PER_MS,
                    "num_prompt_tokens": timeline.num_prompt_tokens,
                    "num_generated_tokens": len(timeline.token_ns),
                    "max_tokens": timeline.max_tokens,
                    "place": places.get(timeline.request_id),
                }
                for timeline in self._recorder.in_flight
            ],
        }

    def show(self, request_id: str) -> dict[str, Any] | None:
        """All that is known of a request, and why it waits if it does; None for an unknown one."""
        record = self._recorder.find(request_id)
        if record is None:
            return None
        now_ns = self._recorder.clock_pair.monotonic_ns
        places = self._places()
        timeline = self._timeline_of(record)
        gaps = intervals.stream_gaps_ns(timeline)
        per_token_ns = intervals.time_per_output_token_ns(timeline)
        return {
            "id": request_id,
            "stage": self._stage(record, places),
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
            "waiting": self._waiting(request_id, places, now_ns),
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

    def _stage(self, timeline: RequestTimeline | RequestRecord, places: dict[str, int]) -> str:
        stage = stage_of(timeline)
        if stage != "in_engine":
            return stage
        return "waiting" if timeline.request_id in places else "prefilling"

    def _num_waiting(self) -> int:
        step = self._recorder.last_step
        return step.num_waiting if step is not None else 0

    @property
    def _is_place_exact(self) -> bool:
        """By the other policies a request that comes later may go first."""
        return self._recorder.config.scheduler.admission == "fifo"

    def _turn_ns(self, timeline: RequestTimeline) -> int:
        """Where it stands in the queue: as `engine/core/admission.py` has it, but of when it left for the engine."""
        config = self._recorder.config.scheduler
        level_ns = int(config.priority_wait_s * _NS_PER_S) if config.admission == "priority" else 0
        return timeline.tokenized_ns + timeline.priority * level_ns

    def _places(self) -> dict[str, int]:
        """Request id -> how many requests are before it, for those that wait.

        Of the requests without a token that the engine had by the end of its last step, the last ones in the queue's
        order are those that wait; whatever came later waits too. That is a guess by `priority` and `pack`: a patient
        one may be computed since before the urgent one came that waits.
        """
        entered = [timeline for timeline in self._recorder.in_flight if stage_of(timeline) == "in_engine"]
        entered.sort(key=self._turn_ns)
        step = self._recorder.last_step
        told_ns = step.start_ns if step is not None else 0
        known = [timeline.request_id for timeline in entered if timeline.tokenized_ns < told_ns]
        computed = set(known[: max(0, len(known) - self._num_waiting())])
        waiting = [timeline.request_id for timeline in entered if timeline.request_id not in computed]
        return {request_id: place for place, request_id in enumerate(waiting)}

    def _waiting(self, request_id: str, places: dict[str, int], now_ns: int) -> dict[str, Any] | None:
        if request_id not in places:
            return None
        num_before = places[request_id]
        step, config = self._recorder.last_step, self._recorder.config
        limit = None if step is None else limit_of(step, config)
        estimate = self._drain.estimate(num_before, now_ns)
        sentence = limit.sentence if limit else "No limit held anything back in the last step: its turn comes next."
        return {
            "num_before": num_before,
            "is_place_exact": self._is_place_exact,
            "blocked_by": step.blocked_by if step is not None else BlockedBy.NOTHING,
            "option": limit.option if limit else None,
            "value": limit.value if limit else None,
            "sentence": sentence,
            "estimate": asdict(estimate) if estimate else None,
        }


def _times(timeline: RequestTimeline, now_ns: int) -> dict[str, float]:
    """Milliseconds of each part that is over; `under_way` is what has passed since the last stamp of one in flight."""
    parts = {name: length_ns / _NS_PER_MS for name, measure in _PARTS if (length_ns := measure(timeline)) is not None}
    if timeline.token_ns:
        parts["decode"] = (timeline.token_ns[-1] - timeline.token_ns[0]) / _NS_PER_MS
    if not timeline.end_ns:
        stamps = (timeline.recv_ns, timeline.parsed_ns, timeline.tokenized_ns, *timeline.token_ns[-1:])
        parts["under_way"] = (now_ns - max(stamps)) / _NS_PER_MS
    return parts


def _ms(length_ns: int | None) -> float | None:
    return None if length_ns is None else length_ns / _NS_PER_MS
