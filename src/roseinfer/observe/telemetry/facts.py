"""Encodes facts for the telemetry process: steps and requests as msgpack, writes and stamps as columns of int64."""

import dataclasses
from array import array
from collections.abc import Mapping
from operator import attrgetter
from types import GenericAlias
from typing import Any, get_type_hints

import msgspec
import numpy as np

from roseinfer.messages import EngineInfo
from roseinfer.observe.hub import OWN, Writes
from roseinfer.observe.metrics.totals import Running
from roseinfer.records import Arrival, LifecycleState, QueueReport, RequestTimeline, StepRecord, Violation

_GROWING = frozenset({"token_ns", "write_ns", "arrivals"})  # which the other side makes from steps and writes
_FIELDS = tuple(field.name for field in dataclasses.fields(RequestTimeline) if field.name not in _GROWING)
_HINTS = get_type_hints(RequestTimeline)
_values_of = attrgetter(*_FIELDS)
_encode_values = msgspec.msgpack.Encoder().encode
_decode_values = msgspec.msgpack.Decoder(GenericAlias(tuple, tuple(_HINTS[name] for name in _FIELDS))).decode

State = msgspec.Raw
"""All fields of a timeline but the growing ones, at the moment when it was encoded."""


def encode_state(timeline: RequestTimeline) -> State:
    return State(_encode_values(_values_of(timeline)))


def decode_state(state: State) -> dict[str, Any]:
    """Returns field by name."""
    return dict(zip(_FIELDS, _decode_values(state), strict=True))


def encode_stamps(stamps: list[int]) -> bytes:
    return array("q", stamps).tobytes()


def decode_stamps(content: bytes) -> list[int]:
    return array("q", content).tolist()


# --- writes -----------------------------------------------------------------------------------------------------------


class SentWrites(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Some writes, as `Writes` has them."""

    own: bytes
    arrivals: list[tuple[Arrival, int]]

    @classmethod
    def of(cls, writes: Writes) -> "SentWrites":
        return cls(writes.own.tobytes(), writes.arrivals)

    def taken(self, timelines: Mapping[int, RequestTimeline]) -> Writes:
        """Returns them, of requests that are here by their serials; adds their stamps to these."""
        own = np.frombuffer(self.own, np.int64).reshape(len(OWN), -1)
        written = [timelines[serial] for serial in own[OWN.index("serial")].tolist()]
        for timeline, written_ns in zip(written, own[OWN.index("written_ns")].tolist(), strict=True):
            timeline.write_ns.append(written_ns)
        return Writes(written, own, self.arrivals)


# --- messages ---------------------------------------------------------------------------------------------------------


class Stepped(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step, with the requests that it gave a token by their serials, as `Advanced` has them."""

    record: StepRecord
    serials: list[int]
    previous_ns: list[int]
    changed: list[State]  # of those with a first token or a last one, or that were preempted


class Batch(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The facts of a moment, to be taken in the order of the fields."""

    started: list[State]
    steps: list[Stepped]
    writes: list[SentWrites]
    ended: list[State]
    refusals: list[str]
    interruptions: list[tuple[int, int, int]]  # start, end, and the number of the cause
    spent_ns: int  # by the front end on facts, since its start
    num_dropped_log_lines: int  # by the front end, since its start


class Entered(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The server entered a state."""

    state: LifecycleState


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The engine is ready."""

    info: EngineInfo


class Stalled(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The engine stands still with work since a moment; 0: it goes on."""

    since_ns: int


class Rested(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The engine was idle, and its invariants were checked."""

    violations: list[Violation]


class InFlight(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that has not ended."""

    state: State
    token_ns: bytes
    write_ns: bytes


class Resumed(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """All that is true at a moment from which on nothing is missing: the first message, and the one after a loss."""

    state: LifecycleState
    engine: EngineInfo | None
    running: Running
    requests: list[InFlight]
    num_dropped: int  # facts, since the server's start
    num_restarts: int  # of the telemetry process


class Question(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """What one side wants to know of the other, by the name of what answers it there; without a number it has none."""

    number: int
    name: str
    payload: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The answer to the question with that number; or an error: the name of its class, its message and `param`."""

    number: int
    payload: bytes
    error: tuple[str, str, str | None] | None = None


Fact = Batch | Entered | EngineReady | Stalled | Rested | Resumed
Message = Fact | Question | Answer


class Present(msgspec.Struct, frozen=True):
    """The answer to `look`: what `/debug` says of this moment."""

    queue: QueueReport
    num_tasks: int  # of the front end's event loop
    requests: list[State]  # in flight


class PageQuery(msgspec.Struct, frozen=True):
    """Asks for a page of metrics, by the client's headers."""

    accept: str
    is_load: bool
    takes_gzip: bool


class Page(msgspec.Struct, frozen=True):
    """A page of metrics."""

    content: bytes
    content_type: str
    is_compressed: bool


class LedgerQuery(msgspec.Struct, frozen=True):
    """Asks what the time between first and newest token of these requests went to."""

    serials: list[int]
