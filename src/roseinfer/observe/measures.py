"""Facts in, numbers out: the functions from a step, a request or the server's state that the catalogue's rows use.

Interval functions give nothing where a stamp is missing; nothing here is clamped, rounded or remembered.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from roseinfer.errors import EngineError
from roseinfer.observe import intervals
from roseinfer.observe.series import ServerState
from roseinfer.records import FinishReason, RequestTimeline, StepRecord

# A divisor, since division rounds correctly and a product with 1e-9 does not: 2,500,000 ns is exactly the bound 0.0025.
NS_PER_S = 1e9


def _error_types(root: type[EngineError]) -> Iterator[str]:
    if root.code is not None:
        yield root.code
    for leaf in root.__subclasses__():
        yield from _error_types(leaf)


PHASES = ("prefill", "decode", "mixed")  # of a step that had rows
ERROR_TYPES = (*sorted(set(_error_types(EngineError))), "other")


def seconds(interval_ns: Callable[[RequestTimeline], float | None]) -> Callable[[RequestTimeline], Sequence[float]]:
    """The interval in seconds as the one value of a request, or no value."""

    def values(timeline: RequestTimeline) -> Sequence[float]:
        interval = interval_ns(timeline)
        return () if interval is None else (interval / NS_PER_S,)

    return values


def newest_token_gaps_s(_: StepRecord, advanced: Sequence[RequestTimeline]) -> list[float]:
    return [gap / NS_PER_S for gap in intervals.newest_token_gaps_ns(advanced)]


def prefilled_tokens(_: StepRecord, advanced: Sequence[RequestTimeline]) -> tuple[int]:
    return (sum([timeline.num_prompt_tokens for timeline in advanced if len(timeline.token_ns) == 1]),)


def client_lag_s(timeline: RequestTimeline) -> Sequence[float]:
    lag_s = timeline.client_submit_lag_s
    return () if lag_s is None or lag_s < 0 else (lag_s,)


def finish_reason(timeline: RequestTimeline) -> str:
    return timeline.finish_reason or FinishReason.ERROR


def server_faults(timeline: RequestTimeline) -> Sequence[float]:
    return (1,) if finish_reason(timeline) in {FinishReason.ERROR, FinishReason.TIMEOUT} else ()


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


def cache_config(state: ServerState) -> Mapping[str, str]:
    engine = state.engine
    if engine is None:
        return {}
    return {"block_size": str(engine.block_size), "num_gpu_blocks": str(engine.num_blocks)}


def model(state: ServerState) -> Mapping[str, str]:
    engine = state.engine
    if engine is None:
        return {}
    return {
        "model_type": engine.model_type,
        "num_parameters": str(engine.num_parameters),
        "vocab_size": str(engine.vocab_size),
        "max_model_len": str(engine.max_model_len),
        "device": engine.device,
        "dtype": engine.dtype,
        "attention": engine.attention,
        "linear": engine.linear,
    }


def stream_gaps_s(timeline: RequestTimeline) -> Sequence[float]:
    return [gap / NS_PER_S for gap in intervals.stream_gaps_ns(timeline)]


def step_s(step: StepRecord, _: Sequence[RequestTimeline]) -> Sequence[float]:
    return ((step.end_ns - step.start_ns) / NS_PER_S,) if step.kind in PHASES else ()


def batch_size(step: StepRecord, _: Sequence[RequestTimeline]) -> Sequence[float]:
    return (step.num_decode_seqs + step.num_prefill_seqs,) if step.kind in PHASES else ()


def error_type(timeline: RequestTimeline) -> str:
    return timeline.error_code if timeline.error_code in ERROR_TYPES else "other"


def dropped(state: ServerState) -> dict[str, float]:
    return {"interval": state.num_refused_intervals, "log_line": state.num_dropped_log_lines}
