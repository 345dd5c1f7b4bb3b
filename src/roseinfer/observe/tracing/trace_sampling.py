"""A caller's `traceparent` and a ratio in, the identity of a request's span out, and whether to keep it by chance.

The header is that of W3C Trace Context, https://www.w3.org/TR/trace-context/. Knows nothing of spans or of slowness.
"""

import random
import re

import msgspec

from roseinfer.observe.tracing.spans import TraceContext
from roseinfer.records import RequestTimeline

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace_id>[0-9a-f]{32})-(?P<span_id>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)
_SAMPLED = 0x01
_LOW_64_BITS = 2**64 - 1


class Parent(msgspec.Struct, frozen=True, gc=False):
    """The caller's span, which is in another process."""

    trace_id: int
    span_id: int
    is_sampled: bool


def parse_traceparent(header: str) -> Parent | None:
    """The parent that the header names; None for a header that is empty or not in the form of the standard."""
    found = _TRACEPARENT.fullmatch(header)
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["rest"]):
        return None
    trace_id, span_id = int(found["trace_id"], 16), int(found["span_id"], 16)
    if not trace_id or not span_id:
        return None
    return Parent(trace_id, span_id, bool(int(found["flags"], 16) & _SAMPLED))


def hex_of(trace_id: int) -> str:
    """As headers, logs and exemplars write it."""
    return f"{trace_id:032x}"


class Sampler:
    """Gives ids, and decides by chance."""

    def __init__(self, ratio: float, numbers: random.Random) -> None:
        self._bound = round(ratio * 2**64)
        self._numbers = numbers

    def new_trace_id(self) -> int:
        """128 random bits, not all of them 0."""
        return self._numbers.getrandbits(128) or 1

    def new_span_id(self) -> int:
        """64 random bits, not all of them 0."""
        return self._numbers.getrandbits(64) or 1

    def begin(self, timeline: RequestTimeline) -> TraceContext:
        """The context of a request that has just begun, whose timeline learns its trace id.

        The caller's decision holds, else the low 64 bits of the trace id decide: so all of a trace is decided alike.
        """
        parent = parse_traceparent(timeline.traceparent)
        if parent is not None:
            trace_id, parent_span_id, is_kept = parent.trace_id, parent.span_id, parent.is_sampled
        else:
            trace_id = int(timeline.trace_id, 16) if timeline.trace_id else self.new_trace_id()
            parent_span_id, is_kept = 0, trace_id & _LOW_64_BITS < self._bound
        timeline.trace_id = hex_of(trace_id)
        return TraceContext(trace_id, self.new_span_id(), parent_span_id, is_kept)
