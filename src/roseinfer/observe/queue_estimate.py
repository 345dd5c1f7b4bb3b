"""Recent steps and starts into why a request waits, how many are before it, and when its turn may come.

Knows no clock and no HTTP. The engine tells of a request with its first token, so whether one that has none waits or
is computed is concluded from the order of arrival and the number of waiting ones; admission policies other than `fifo`
and preempted requests, which wait first, make places approximate.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from roseinfer.config.tree import Config
from roseinfer.records import Advanced, BlockedBy, StepRecord

NUM_STARTS = 512
MIN_STARTS = 8  # of which an estimate can be made
_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class Limit:
    """An option of the scheduler that keeps requests waiting, and its value."""

    option: str
    value: int
    sentence: str


def limit_of(step: StepRecord, config: Config) -> Limit | None:
    """The limit that kept the first waiting request out of a step; None when nothing did."""
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
            option, value = "scheduler.max_prefix_wait_steps", config.scheduler.max_prefix_wait_steps
            reason = f"another request is computing the prefix that it needs; it waits {value} steps for that at most"
    return Limit(option, value, f"{waiting} {reason}.")


@dataclass(frozen=True, slots=True)
class StartEstimate:
    """In how many seconds a request may start: the median, and the tenth and ninetieth percentile."""

    seconds: float
    low_seconds: float
    high_seconds: float
    num_starts: int  # from which it was made


class QueueDrain:
    """When requests left the queue, while there was one."""

    def __init__(self) -> None:
        self._starts_ns: deque[int] = deque(maxlen=NUM_STARTS)

    def note_step(self, record: StepRecord, advanced: Advanced) -> None:
        """Without a queue, starts tell how fast requests came, not how fast they are taken: those are forgotten."""
        if not record.num_waiting:
            self._starts_ns.clear()
        elif record.num_prefill_seqs:
            self._starts_ns.extend(sorted(timeline.scheduled_ns for timeline in advanced.newcomers))

    def estimate(self, num_before: int, now_ns: int) -> StartEstimate | None:
        """For a request with so many before it; None as long as the queue has told too little.

        The spans in which as many requests as that left the queue, recently; where it has not lasted that long, the
        longest ones are stretched.
        """
        starts = np.array(self._starts_ns, np.int64)
        if len(starts) < MIN_STARTS:
            return None
        width = num_before + 1
        known = min(width, len(starts) // 2)
        spans = (starts[known:] - starts[:-known]) * (width / known)
        passed = now_ns - starts[-1]
        low, middle, high = (
            max(0.0, (value - passed) / _NS_PER_S) for value in np.quantile(spans, (0.1, 0.5, 0.9)).tolist()
        )
        return StartEstimate(middle, low, high, len(starts))
