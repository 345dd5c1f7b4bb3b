"""Finds the widest gaps of a recording, and the steps and requests behind them; says each in a sentence.

Streams that advance together share a gap, so gaps are grouped by the step that ended them and by their cause.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from roseinfer.explain.durations import ms
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.recorder.recording import Recording, RequestRecord, step_of
from roseinfer.records import StepRecord

_MOST_NAMED = 3  # requests in a sentence


class SlowGaps(msgspec.Struct, frozen=True):
    """Gaps of one cause that one step ended."""

    step_id: int
    cause: Cause
    num_gaps: int
    widest_s: float
    waiting: list[str]  # ids of the requests that waited, the longest wait first
    behind: list[str]  # ids of the requests that they waited for; empty where the cause is no request's
    sentence: str


def widest_gaps(gaps: Iterable[Gap], recording: Recording, limit: int) -> list[SlowGaps]:
    """Returns the widest gaps in at most `limit` groups, the widest first."""
    groups: dict[tuple[int, Cause], list[Gap]] = defaultdict(list)
    for gap in sorted(gaps, key=lambda gap: -gap.duration_ns):
        key = (gap.step_id or -gap.serial - 1, gap.cause)  # without steps, a request's gap is its own
        if key in groups or len(groups) < limit:
            groups[key].append(gap)
    reader = _Reader(recording)
    return [reader.describe(group) for group in groups.values()]


class _Reader:
    """Finds in a recording what stands behind gaps."""

    def __init__(self, recording: Recording) -> None:
        self._steps = recording.steps
        self._interruptions = recording.interruptions
        self._requests = {request.serial: request for request in recording.requests}

    def describe(self, group: Sequence[Gap]) -> SlowGaps:
        """Describes gaps that share a step and a cause, the widest first."""
        widest = group[0]
        step = self._step_behind(widest)
        behind = self._behind(widest, step)
        named = {gap.serial: self._requests[gap.serial].request_id for gap in group if gap.serial in self._requests}
        return SlowGaps(
            step_id=widest.step_id if step is None else step.step_id,
            cause=widest.cause,
            num_gaps=len(group),
            widest_s=widest.duration_ns / 1e9,
            waiting=list(named.values()),
            behind=[request.request_id for request in behind],
            sentence=self._sentence(widest, step, behind),
        )

    def _step_behind(self, gap: Gap) -> StepRecord | None:
        """Returns the step of the gap in which its cause shows most; None if the recording has none of its steps."""
        ids, tokens = self._steps["step_id"], self._steps["tokens_ns"]
        inside = self._steps[(tokens > gap.start_ns) & (ids <= gap.step_id)]
        if not len(inside):
            return None
        column = gap.cause.row.column
        place = int(np.argmax(inside[column])) if column else len(inside) - 1
        return step_of(inside[place])

    def _behind(self, gap: Gap, step: StepRecord | None) -> list[RequestRecord]:
        """Returns the requests that a gap waited for, the longest prompt first."""
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
        part, story = ms(gap.parts.get(gap.cause, 0) / 1e9), gap.cause.row.story
        if step is None and ("{step" in story or "{names" in story):
            return f"{part} of {gap.cause}"
        names = _names(behind) or "(not in the recording)"
        return story.format(step=step, names=names, part=part, process=self._interrupted_process(gap))

    def _interrupted_process(self, gap: Gap) -> str:
        rows = self._interruptions
        rows = rows[(rows["start_ns"] < gap.end_ns) & (rows["end_ns"] > gap.start_ns)]
        return "the front end" if (rows["cause"] == gap.cause.number).any() else "the engine"


def _is_read_in(request: RequestRecord, step: StepRecord) -> bool:
    """Returns whether the step can have computed tokens of the request's prompt, first time or again."""
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
