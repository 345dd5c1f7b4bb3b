"""Encodes facts for the telemetry process: steps and requests as msgpack, writes and stamps as columns of int64."""

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import GenericAlias
from typing import Any, get_type_hints, overload

import msgspec
import numpy as np

from roseinfer.messages import EngineInfo
from roseinfer.observe.hub import OWN, Column, Writes
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


def taken_writes(pieces: Sequence[SentWrites], timelines: Mapping[int, RequestTimeline]) -> Writes:
    """Returns the writes of requests that are here by their serials; adds their stamps to these."""
    tables = [np.frombuffer(piece.own, np.int64).reshape(len(OWN), -1) for piece in pieces]
    own = tables[0] if len(tables) == 1 else np.concatenate(tables, axis=1)
    serials = own[OWN.index("serial")]
    order = serials.argsort(kind="stable")
    ordered = serials[order]
    stamps: list[int] = own[OWN.index("written_ns")][order].tolist()
    last = np.flatnonzero(ordered[1:] != ordered[:-1]).tolist()  # of each request but the last, among the ordered
    found, begin = dict[int, RequestTimeline](), 0
    for end in (*[at + 1 for at in last], len(stamps)):  # many of them are one request's
        serial = int(ordered[begin])
        timeline = found[serial] = timelines[serial]
        timeline.write_ns.extend(stamps[begin:end])
        begin = end
    return Writes(_Written(serials, found), own, [arrival for piece in pieces for arrival in piece.arrivals])


class _Written(Sequence[RequestTimeline]):
    """The requests of writes, of which few are looked at."""

    def __init__(self, serials: Column, found: Mapping[int, RequestTimeline]) -> None:
        self._serials = serials
        self._found = found

    def __len__(self) -> int:
        return len(self._serials)

    @overload
    def __getitem__(self, at: int) -> RequestTimeline: ...
    @overload
    def __getitem__(self, at: slice) -> list[RequestTimeline]: ...
    def __getitem__(self, at: int | slice) -> RequestTimeline | list[RequestTimeline]:
        if isinstance(at, slice):
            return [self._found[serial] for serial in self._serials[at].tolist()]
        return self._found[int(self._serials[at])]


# --- messages ---------------------------------------------------------------------------------------------------------


class Stepped(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step, with the requests that it gave a token by their serials, as `Advanced` has them."""

    record: StepRecord
    serials: list[int] | None  # None: those of the step before in the same batch, in the same order
    previous_ns: list[int] | int  # one for all of them, where it is the same and each has one token
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
    entered_ns: dict[LifecycleState, int]  # when the server entered the states of this start


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
    spent_ns: int  # as in a batch
    num_dropped_log_lines: int  # likewise


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
