"""Explains the gaps of a recording: numbers, causes and advice, in one struct that is also the JSON of `--json`."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from roseinfer.errors import InvalidRequest
from roseinfer.explain.distribution import CauseShare, Mode, Parts, Without, find_modes
from roseinfer.explain.slow_gaps import SlowGaps, widest_gaps
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.recorder.recording import Recording

Timing = Literal["wire", "engine", "ledger"]
"""Of writes, of tokens, or of whole requests: then a gap is the average one of a request."""

_NUM_WIDEST = 5
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
    "scheduler.max_prefill_tokens": "no limit but max_num_batched_tokens {max_num_batched_tokens}",
    "scheduler.max_prefill_seqs": "as many as max_num_seqs {max_num_seqs}",
    "cache.num_blocks": "what the memory of cache.cpu_memory_mib or cache.memory_utilization holds",
}
"""What an option that is null means, with values of the same section."""


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


def explain(gaps: Sequence[Gap], recording: Recording, source: str, clock: Timing) -> Explanation:
    """Explains gaps that end with tokens or writes of a recording. Raises InvalidRequest if there is none."""
    if not gaps:
        raise InvalidRequest("there is no gap between two tokens in it, so there is nothing to explain.", param=source)
    parts = Parts(gaps)
    causes = parts.shares()
    unknown = [share for share in causes if share.cause is Cause.UNKNOWN]
    num_votes, num_slow_votes = len(parts.votes.is_slow), int(parts.votes.is_slow.sum())
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
    )


def _advice(cause: Cause, recording: Recording) -> OptionAdvice:
    option, advice = cause.row.option, cause.row.advice
    longest = max((request.num_prompt_tokens for request in recording.requests), default=0)
    if cause is Cause.PREFILL_OF_OTHERS and 0 < longest <= SHORT_PROMPT_TOKENS:
        option, advice = _MANY_SHORT_PROMPTS_OPTION, _MANY_SHORT_PROMPTS
    section, _, name = option.partition(".")
    options = recording.meta.config.get(section, {})
    meaning = _MEANING_OF_NULL.get(option, "") if name in options and options[name] is None else ""
    return OptionAdvice(
        cause, option, options.get(name), advice, meaning.format_map(defaultdict(str, options)).rstrip()
    )
