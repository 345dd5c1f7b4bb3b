"""The functions from a step, writes, a request or the server's state to the values of a metric.

Interval functions give nothing where a stamp is missing; nothing here is clamped, rounded or remembered.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from roseinfer.errors import (
    CapacityError,
    EngineDead,
    EngineError,
    QueueTimeout,
    RequestError,
    RoseinferError,
    SlowReader,
)
from roseinfer.messages import EngineInfo
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.hub import Writes
from roseinfer.records import Advanced, FinishReason, Invariant, LifecycleState, RequestTimeline, StepRecord

# A divisor, since division rounds correctly and a product with 1e-9 does not: 2,500,000 ns is exactly the bound 0.0025.
NS_PER_S = 1e9


def _codes(root: type[RoseinferError]) -> Iterator[str]:
    if root.code is not None:
        yield root.code
    for leaf in root.__subclasses__():
        yield from _codes(leaf)


PHASES = ("prefill", "decode", "mixed")  # of a step that had rows
OTHER = "other"  # an error that was not foreseen
ERROR_TYPES = (*sorted({*_codes(EngineError)} - {EngineError.code}), OTHER)  # which is of `LLM` alone
# A slow reader has got a part of its answer; each of the others can be refused before the engine is asked.
_EARLY = (RequestError, CapacityError, EngineDead, QueueTimeout)
_REFUSALS = {code for root in _EARLY for code in _codes(root)} - {SlowReader.code}
REJECTION_CODES = (*sorted(_REFUSALS), OTHER)
MODEL_FIELDS = (
    *("model_type", "num_parameters", "vocab_size", "max_model_len"),
    *("device", "dtype", "attention", "linear", "num_threads"),
)


@dataclass(slots=True)
class ServerState:
    """The last of each fact, which gauges are read from at a scrape."""

    version: str
    lifecycle: LifecycleState = LifecycleState.STARTING
    engine: EngineInfo | None = None
    last_step: StepRecord | None = None
    last_step_end_ns: int = 0
    last_step_unix_s: float = 0.0
    num_received: int = 0
    num_finished: int = 0
    num_refusals: Counter[str] = field(default_factory=Counter)  # by code
    num_refused_intervals: int = 0
    num_dropped_log_lines: int = 0
    gap_ns: Mapping[Cause, int] = field(default_factory=lambda: dict.fromkeys(Cause, 0))
    num_slow_gaps: Mapping[Cause, int] = field(default_factory=lambda: dict.fromkeys(Cause, 0))
    observability_ns: int = 0
    num_dropped_spans: int = 0
    num_restarts: int = 0
    num_violations: dict[Invariant, int] = field(default_factory=lambda: dict.fromkeys(Invariant, 0))


# --- of a step ------------------------------------------------------------------------------------------------------


def phase(step: StepRecord) -> str:
    return step.kind


def step_s(step: StepRecord, _: Advanced) -> Sequence[float]:
    return ((step.end_ns - step.start_ns) / NS_PER_S,) if step.kind in PHASES else ()


def batch_size(step: StepRecord, _: Advanced) -> Sequence[float]:
    return (step.num_decode_seqs + step.num_prefill_seqs,) if step.kind in PHASES else ()


def token_gaps_s(step: StepRecord, advanced: Advanced) -> list[float]:
    """Returns the inter-token latency of each of the step's tokens; none where it is the first of its request."""
    tokens_ns, stamps = step.tokens_ns, advanced.previous_ns
    newest_ns = max(stamps, default=0)
    if newest_ns and (count := stamps.count(newest_ns)) + advanced.num_newcomers == len(stamps):
        return [(tokens_ns - newest_ns) / NS_PER_S] * count  # nearly always: all that go on were in the step before
    return [(tokens_ns - previous_ns) / NS_PER_S for previous_ns in stamps if previous_ns]


def prefilled_tokens(_: StepRecord, advanced: Advanced) -> Sequence[float]:
    if not advanced.num_newcomers:
        return ()
    return (sum([timeline.num_prompt_tokens for timeline in advanced.newcomers]),)


def counted(count_of: Callable[[StepRecord], int]) -> Callable[[StepRecord, Advanced], Sequence[float]]:
    """Makes of a count a step's one value, or no value where it is 0, as most are."""

    def values(step: StepRecord, _: Advanced) -> Sequence[float]:
        count = count_of(step)
        return (count,) if count else ()

    return values


# --- of socket writes -----------------------------------------------------------------------------------------------


def stream_gaps_s(writes: Writes) -> npt.NDArray[np.float64]:
    """From each request's write before to this one; none where it is the first of its request. `(num_gaps,)`"""
    columns = writes.columns()
    start_ns = columns["start_ns"]
    gaps_ns = (columns["written_ns"] - start_ns)[start_ns > 0]
    return gaps_ns / NS_PER_S


# --- of a request that ended ----------------------------------------------------------------------------------------


def seconds(interval_ns: Callable[[RequestTimeline], float | None]) -> Callable[[RequestTimeline], Sequence[float]]:
    """Makes of an interval the one value of a request, in seconds, or no value."""

    def values(timeline: RequestTimeline) -> Sequence[float]:
        interval = interval_ns(timeline)
        return () if interval is None else (interval / NS_PER_S,)

    return values


def is_streamed(timeline: RequestTimeline) -> str:
    """As a label's value."""
    return "true" if timeline.is_streamed else "false"


def client_lag_s(timeline: RequestTimeline) -> Sequence[float]:
    lag_s = timeline.client_submit_lag_s
    return () if lag_s is None or lag_s < 0 else (lag_s,)


def finish_reason(timeline: RequestTimeline) -> str:
    return timeline.finish_reason or FinishReason.ERROR


def server_faults(timeline: RequestTimeline) -> Sequence[float]:
    return (1,) if finish_reason(timeline) in {FinishReason.ERROR, FinishReason.TIMEOUT} else ()


def error_type(timeline: RequestTimeline) -> str:
    return timeline.error_code if timeline.error_code in ERROR_TYPES else OTHER


# --- of the server's state ------------------------------------------------------------------------------------------


def kv_blocks(state: ServerState) -> dict[str, float]:
    step = state.last_step
    if step is None:
        total = state.engine.num_blocks if state.engine else 0
        return {"used": 0, "cached": 0, "free": total, "total": total}
    used, cached, total = step.num_used_blocks, step.num_cached_blocks, step.num_total_blocks
    return {"used": used, "cached": cached, "free": total - used - cached, "total": total}


def kv_usage(state: ServerState) -> dict[str, float]:
    blocks = kv_blocks(state)
    return {"": blocks["used"] / blocks["total"] if blocks["total"] else 0.0}


def model(state: ServerState) -> Sequence[str | int]:
    return tuple(getattr(state.engine, name) for name in MODEL_FIELDS) if state.engine else ()


def dropped(state: ServerState) -> dict[str, float]:
    return {
        "interval": state.num_refused_intervals,
        "log_line": state.num_dropped_log_lines,
        "span": state.num_dropped_spans,
    }
