"""The widest gaps into the steps and requests behind them, each in a sentence. Knows recordings, measures nothing.

Streams that advance together share a gap, so gaps are told by the step that ended them and by their cause.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from roseinfer.explain.durations import ms
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.recorder.recording import CAUSES, Recording, RequestRecord, step_of
from roseinfer.records import Cause, StepRecord

_MOST_NAMED = 3  # requests in a sentence


class Story(msgspec.Struct, frozen=True):
    """Gaps of one cause that one step ended."""

    step_id: int
    cause: Cause
    num_gaps: int
    widest_s: float
    waiting: list[str]  # ids of the requests that waited, the longest wait first
    behind: list[str]  # ids of the requests that they waited for; empty where the cause is no request's
    sentence: str


def tell(gaps: Iterable[Gap], recording: Recording, limit: int) -> list[Story]:
    """The stories of the widest gaps, the widest first, and no more than `limit`."""
    groups: dict[tuple[int, Cause], list[Gap]] = defaultdict(list)
    for gap in sorted(gaps, key=lambda gap: -gap.duration_ns):
        key = (gap.step_id or -gap.serial - 1, gap.cause)  # without steps, a request's gap is its own
        if key in groups or len(groups) < limit:
            groups[key].append(gap)
    return [_Teller(recording).story(group) for group in groups.values()]


class _Teller:
    def __init__(self, recording: Recording) -> None:
        self._steps = recording.steps
        self._interruptions = recording.interruptions
        self._requests = {request.serial: request for request in recording.requests}

    def story(self, group: Sequence[Gap]) -> Story:
        """Of gaps that share a step and a cause, the widest first."""
        widest = group[0]
        step = self._step_behind(widest)
        behind = self._behind(widest, step)
        named = {gap.serial: self._requests[gap.serial].request_id for gap in group if gap.serial in self._requests}
        return Story(
            step_id=widest.step_id if step is None else step.step_id,
            cause=widest.cause,
            num_gaps=len(group),
            widest_s=widest.duration_ns / 1e9,
            waiting=list(named.values()),
            behind=[request.request_id for request in behind],
            sentence=self._sentence(widest, step, behind),
        )

    def _step_behind(self, gap: Gap) -> StepRecord | None:
        """The step of the gap in which its cause shows most; None if the recording has none of the gap's steps."""
        ids, tokens = self._steps["step_id"], self._steps["tokens_ns"]
        inside = self._steps[(tokens > gap.start_ns) & (ids <= gap.step_id)]
        if not len(inside):
            return None
        measure = _MEASURES.get(gap.cause)
        place = len(inside) - 1 if measure is None else int(np.argmax(inside[measure]))
        return step_of(inside[place])

    def _behind(self, gap: Gap, step: StepRecord | None) -> list[RequestRecord]:
        """The requests that a gap waited for, the longest prompt first."""
        if step is None:
            return []
        if gap.cause is Cause.PREFILL_OF_OTHERS:
            others = [request for request in self._requests.values() if request.serial != gap.serial]
            found = [request for request in others if _is_read_in(request, step)]
            return sorted(found, key=lambda request: -request.num_prompt_tokens)
        if gap.cause in {Cause.KV_WAIT, Cause.PREEMPTED} and gap.serial in self._requests:
            return [self._requests[gap.serial]]
        return []

    def _sentence(self, gap: Gap, step: StepRecord | None, behind: Sequence[RequestRecord]) -> str:
        part = ms(gap.parts.get(gap.cause, 0) / 1e9)
        if step is not None and gap.cause in _OF_A_STEP:
            return _OF_A_STEP[gap.cause](step, _names(behind), part)
        if gap.cause in {Cause.GC, Cause.SCRAPE}:
            return self._interruption(gap, part)
        return f"{part} of {gap.cause} {_PLACES.get(gap.cause, '')}".rstrip()

    def _interruption(self, gap: Gap, part: str) -> str:
        rows = self._interruptions
        rows = rows[(rows["start_ns"] < gap.end_ns) & (rows["end_ns"] > gap.start_ns)]
        mine = rows[rows["cause"] == CAUSES.index(gap.cause)]
        where = "the front end" if len(mine) else "the engine"
        what = "a garbage collection in" if gap.cause is Cause.GC else "a scrape of /metrics by"
        return f"{what} {where} took {part}"


def _is_read_in(request: RequestRecord, step: StepRecord) -> bool:
    """Whether the step can have computed tokens of the request's prompt, first time or again."""
    if not request.scheduled_ns or request.scheduled_ns > step.start_ns:
        return False
    is_first = not request.token_ns or request.token_ns[0] >= step.tokens_ns
    resumed_ns = request.resumed_ns
    is_again = 0 < resumed_ns <= step.start_ns and not any(
        resumed_ns < token_ns < step.tokens_ns for token_ns in request.token_ns
    )
    has_ended = bool(request.end_ns) and request.end_ns < step.start_ns
    return (is_first or is_again) and not has_ended


def _names(requests: Sequence[RequestRecord]) -> str:
    named = ", ".join(request.request_id for request in requests[:_MOST_NAMED])
    more = len(requests) - _MOST_NAMED
    return f"{named} and {more} more" if more > 0 else named


_MEASURES = {  # the column of STEP_DTYPE in which a cause shows
    Cause.PREFILL_OF_OTHERS: "num_prefill_tokens",
    Cause.PREEMPTED: "num_prefill_tokens",
    Cause.GRAPH_CAPTURE: "capture_ns",
    Cause.H2D_COPY: "h2d_ns",
    Cause.SAMPLE_SYNC: "sample_ns",
    Cause.NOT_SELECTED: "num_not_selected",
    Cause.KV_WAIT: "num_used_blocks",
}

_OF_A_STEP: dict[Cause, Callable[[StepRecord, str, str], str]] = {
    Cause.DECODE: lambda step, _, part: f"decoding {step.num_decode_seqs} sequences took {part}",
    Cause.PREFILL_OF_OTHERS: lambda step, names, _: (
        f"prefill of request {names or '(not in the recording)'}, {step.num_prefill_tokens} tokens"
    ),
    Cause.BATCH_GROWTH: lambda step, *_: f"the step grew to {step.num_decode_seqs} decoding sequences",
    Cause.GRAPH_CAPTURE: lambda _, __, part: f"a CUDA graph was captured, {part}",
    Cause.GRAPH_MISS: lambda step, *_: (
        f"no CUDA graph could hold its {step.num_decode_seqs} decoding and {step.num_prefill_seqs} other rows"
    ),
    Cause.H2D_COPY: lambda step, _, part: f"copies of {step.h2d_bytes} bytes to the device took {part}",
    Cause.SAMPLE_SYNC: lambda _, __, part: f"sampling took {part}",
    Cause.SCHEDULE: lambda _, __, part: f"the engine's own work between steps, or its waiting for a core, took {part}",
    Cause.KV_WAIT: lambda step, names, _: (
        f"request {names} had lost its blocks; {step.num_used_blocks} of {step.num_total_blocks} were in use"
    ),
    Cause.PREEMPTED: lambda step, names, _: f"request {names} was computed again, {step.num_prefill_tokens} tokens",
    Cause.NOT_SELECTED: lambda step, *_: (
        f"{step.num_not_selected} sequences had no turn beside the {step.num_decode_seqs} that were decoded"
    ),
    Cause.PROFILER: lambda _, __, part: f"a profiler recorded the step, or began or ended beside it, {part}",
}
"""Of the step, the requests behind the gap, and how long the cause took."""

_PLACES = {
    Cause.ENGINE_OUTBOX: "between the engine and the front end",
    Cause.DETOKENIZE: "in the front end",
    Cause.EVENT_LOOP: "in the front end",
    Cause.CLIENT_BACKPRESSURE: "at the socket",
}
