"""A timeline in, its time as parts that add up to the nanosecond out; knows neither steps nor HTTP."""

from collections.abc import Mapping

from roseinfer.observe.gaps.causes import Cause
from roseinfer.records import FinishReason, RequestTimeline

_COMPLETE = frozenset({FinishReason.STOP, FinishReason.LENGTH})


def parts_ns(timeline: RequestTimeline, decode_ns: Mapping[Cause, int], until_ns: int) -> dict[str, int]:
    """Parts of the time from the request's first byte to `until_ns`, in their order; together they are all of it.

    `decode_ns` says what the time from its first token to its newest went to, and adds up to it. A request that was
    cut short has the parts it lived through, the last of them up to the end.
    """
    parts: dict[str, int] = {}
    at_ns = timeline.recv_ns
    tokens = timeline.token_ns
    for name, reached_ns in (
        ("receive", timeline.parsed_ns),
        ("tokenize", timeline.tokenized_ns),
        ("submit_lag", timeline.inbox_ns),
        ("queue_wait", timeline.scheduled_ns),
        ("prefill", tokens[0] if tokens else 0),
    ):
        if not reached_ns:
            return parts | {name: until_ns - at_ns}
        parts[name] = reached_ns - at_ns
        at_ns = reached_ns
    parts |= {f"decode.{cause}": duration for cause, duration in decode_ns.items() if duration}
    at_ns = tokens[-1]
    arrival = timeline.arrival
    if timeline.finish_reason is not None and timeline.finish_reason not in _COMPLETE:
        return parts | {"cut_short": until_ns - at_ns}  # waiting for a token that never came, or was not told
    if arrival is not None and arrival.tokens_ns == at_ns:
        parts["engine_outbox"] = arrival.sent_ns - at_ns
        at_ns = arrival.sent_ns
    return parts | {"delivery": until_ns - at_ns}


def as_json(timeline: RequestTimeline, decode_ns: Mapping[Cause, int], until_ns: int) -> dict[str, object]:
    """The ledger as a client gets it: docs/http-api.md says what each part is."""
    tokens = timeline.token_ns
    return {
        "total_ns": until_ns - timeline.recv_ns,
        "parts_ns": parts_ns(timeline, decode_ns, until_ns),
        "engine_time_to_first_token_ns": tokens[0] - timeline.tokenized_ns if tokens else None,
        "time_per_output_token_ns": (tokens[-1] - tokens[0]) / (len(tokens) - 1) if len(tokens) > 1 else None,
        "num_output_tokens": len(tokens),
        "num_cached_tokens": timeline.num_cached_tokens,
        "num_preemptions": timeline.num_preemptions,
        "finish_reason": timeline.finish_reason,
    }
