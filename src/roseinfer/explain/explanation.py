"""Explains the gaps of a recording: numbers, causes and advice, in one struct that is also the JSON of `--json`."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from roseinfer.errors import InvalidRequest
from roseinfer.explain.distribution import CauseShare, Mode, Parts, Without, find_modes
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.recorder.recording import Recording, RequestRecord, step_of
from roseinfer.records import StepRecord

Timing = Literal["wire", "engine", "ledger"]
"""Of writes, of tokens, or of whole requests: then a gap is the average one of a request."""

_NUM_WIDEST = 5
_MOST_NAMED = 3  # requests in a sentence
_MOST_OTHER_VOTES = 0.1  # of gaps that are not slow; more say something of their own. Of nine, one is too many
_WORTH_ADVICE = 0.05  # share of p99 - p50 below which a change would not be noticed

SHORT_PROMPT_TOKENS = 64
"""No longer than this a prompt is hardly worth cutting: each piece would pay again what a step costs beside tokens."""

_MANY_SHORT_PROMPTS_OPTION = "scheduler.max_prefill_seqs"
_MANY_SHORT_PROMPTS = (
    f"No prompt has more than {SHORT_PROMPT_TOKENS} tokens, so there is little to cut. A smaller value begins fewer of "
    "them in one step: every stream waits less for them, and they wait longer for their first token."
)
_MEANING_OF_NULL = {
    "scheduler.target_itl_ms": "on a CPU 30 ms, or twice what a step takes without prompts; else no limit but "
    "max_num_batched_tokens {max_num_batched_tokens}",
    "scheduler.max_prefill_seqs": "as many as max_num_seqs {max_num_seqs}",
    "cache.num_blocks": "what the memory of cache.cpu_memory_mib or cache.memory_utilization holds",
}
"""What an option that is null means, with values of the same section."""


class SlowGaps(msgspec.Struct, frozen=True):
    """Gaps of one cause that one step ended."""

    step_id: int
    cause: Cause
    num_gaps: int
    widest_s: float
    waiting: list[str]  # ids of the requests that waited, the longest wait first
    behind: list[str]  # ids of the requests that they waited for; empty where the cause is no request's
    sentence: str


class OptionAdvice(msgspec.Struct, frozen=True):
    """What to change against a cause."""

    cause: Cause
    option: str  # path in the configuration; empty where no option helps
    value: Any  # at the time of the recording; None where it is not known
    advice: str
    meaning: str = ""  # of a value that is null


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why the gaps between tokens are as they are. Durations in seconds, shares of 1."""

    source: str
    clock: Timing
    model_name: str
    trigger: str  # the rule that saved the recording, if one did
    span_s: float  # from the first gap's start to the last one's end
    num_requests: int
    num_gaps: int
    num_slow_gaps: int
    num_votes: int  # gaps that have one on the shares: those around p99, of which the slowest are no part
    num_slow_votes: int  # of them are slow
    has_few_slow_gaps: bool  # among those: the causes are in part, or all, those of gaps that are not slow
    p50_s: float
    p99_s: float
    widest_s: float
    modes: list[Mode]  # the most frequent first
    causes: list[CauseShare]  # of p99 - p50, the largest share first
    without: list[Without]  # in the order of the causes
    widest: list[SlowGaps]
    knobs: list[OptionAdvice]
    unexplained: CauseShare  # of p99 - p50, what has no name
    unknown_share: float  # of the time of all gaps
    cpu_limit: float | None = None  # cores that the engine's control groups allowed when it started; None without one
    num_throttled: int = 0  # of the slow gaps, those whose cause is `cpu_throttled`
    num_draft_tokens: int = 0  # that the recorded steps verified: see scheduler.speculation
    num_accepted_tokens: int = 0  # of those, the ones that became tokens without a step of their own


def explain(gaps: Sequence[Gap], recording: Recording, source: str, clock: Timing) -> Explanation:
    """Explains gaps that end with tokens or writes of a recording. Raises InvalidRequest if there is none."""
    if not gaps:
        raise InvalidRequest("there is no gap between two tokens in it, so there is nothing to explain.", param=source)
    parts = Parts(gaps)
    causes = parts.shares()
    unknown = [share for share in causes if share.cause is Cause.UNKNOWN]
    num_votes, num_slow_votes = len(parts.is_slow), int(parts.is_slow.sum())
    return Explanation(
        source=source,
        clock=clock,
        model_name=recording.meta.model_name,
        trigger=recording.meta.trigger,
        span_s=(max(gap.end_ns for gap in gaps) - min(gap.start_ns for gap in gaps)) / 1e9,
        num_requests=len({gap.serial for gap in gaps}),
        num_gaps=len(gaps),
        num_slow_gaps=sum(gap.is_slow for gap in gaps),
        num_votes=num_votes,
        num_slow_votes=num_slow_votes,
        has_few_slow_gaps=num_votes - num_slow_votes > _MOST_OTHER_VOTES * num_votes,
        p50_s=parts.p50_s,
        p99_s=parts.p99_s,
        widest_s=float(parts.durations_s[-1]),
        modes=find_modes(parts.durations_s),
        causes=causes,
        without=[parts.without(share.cause) for share in causes],
        widest=widest_gaps(gaps, recording, _NUM_WIDEST),
        knobs=[_advice(share.cause, recording) for share in causes if share.share >= _WORTH_ADVICE],
        unexplained=unknown[0] if unknown else CauseShare(Cause.UNKNOWN, 0.0, 0.0),
        unknown_share=parts.share_of_all(Cause.UNKNOWN),
        cpu_limit=recording.meta.engine.cpu_limit if recording.meta.engine else None,
        num_throttled=sum(gap.is_slow and gap.cause is Cause.CPU_THROTTLED for gap in gaps),
        num_draft_tokens=int(recording.steps["num_draft_tokens"].sum()),
        num_accepted_tokens=int(recording.steps["num_accepted_tokens"].sum()),
    )


def _advice(cause: Cause, recording: Recording) -> OptionAdvice:
    option, advice = cause.row.option, cause.row.advice
    longest = max((request.num_prompt_tokens for request in recording.requests), default=0)
    if cause is Cause.PREFILL_OF_OTHERS and 0 < longest <= SHORT_PROMPT_TOKENS:
        option, advice = _MANY_SHORT_PROMPTS_OPTION, _MANY_SHORT_PROMPTS
    section, _, name = option.partition(".")
    options = recording.meta.config.get(section, {})
    if option == Cause.PREFILL_OF_OTHERS.row.option and options.get("max_prefill_tokens") is not None:
        name = "max_prefill_tokens"  # which stands in the place of the other
        option = f"{section}.{name}"
    meaning = _MEANING_OF_NULL.get(option, "") if name in options and options[name] is None else ""
    return OptionAdvice(
        cause, option, options.get(name), advice, meaning.format_map(defaultdict(str, options)).rstrip()
    )


# --- the widest gaps --------------------------------------------------------------------------------------------------


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
        """Returns where the greater part was: until its token was known a gap was the engine's."""
        known = self._steps["tokens_ns"][self._steps["step_id"] == gap.step_id]
        begin_ns = max(gap.start_ns, *known.tolist(), 0)
        rows = self._interruptions[self._interruptions["cause"] == gap.cause.number]
        within = np.minimum(rows["end_ns"], gap.end_ns) - np.maximum(rows["start_ns"], begin_ns)
        in_front_end_ns = int(within[within > 0].sum())
        return "the front end" if 2 * in_front_end_ns > gap.parts.get(gap.cause, 0) else "the engine"


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


# --- words for numbers ------------------------------------------------------------------------------------------------


def ms(seconds: float) -> str:
    """Formats seconds as milliseconds with three digits."""
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def percent(share: float) -> str:
    """Formats a share of 1 as a percentage, with a digit more where it is small."""
    value = share * 100
    return f"{value:.0f} %" if value >= 10 or value == 0 else f"{value:.1f} %"
