"""The flight recorder: keeps the last steps, writes and requests in rings of fixed size, and makes recordings of them.

Always on: the cost of a step is one row, of a write another, and none of it stays allocated. Facts come on the event
loop and snapshots are taken there, so there is no lock; interruptions may come from any thread and wait in a queue.
"""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from roseinfer.config.options import Config
from roseinfer.messages import EngineInfo
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.hub import Column, WriteObserver, Writes
from roseinfer.observe.recorder.recording import (
    INTERRUPTION_DTYPE,
    STEP_DTYPE,
    WRITE_DTYPE,
    ClockPair,
    Recording,
    RecordingMeta,
    RequestRecord,
    StructArray,
    step_row,
)
from roseinfer.records import Advanced, FinishReason, RequestTimeline, StepRecord

NUM_INTERRUPTIONS = 4096
_SECTIONS = ("scheduler", "cache", "runner", "engine")  # of the configuration: nothing that names a key or a host
_OF_GAPS = ("slow_gap_factor", "slow_gap_min_ms")  # of the section `observe`: which gaps are slow

# What is remembered: socket writes for each engine step, and steps for each finished request.
WRITES_PER_STEP = 8
STEPS_PER_REQUEST = 8
_MANY_PIECES = 8  # of writes, which are stored together: that takes hardly longer than for one
_REJECTED_DIVISOR = 8  # finished requests that are remembered for each one that was refused

_Ended = tuple[int, str, bytes]
"""When a request ended, its id, and its record."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RequestRecord).decode


class Ring:
    """The newest rows of a table of fixed size."""

    def __init__(self, dtype: "np.dtype[np.void]", num_rows: int) -> None:
        self.num_added = 0
        self._rows = np.zeros(num_rows, dtype)

    def __len__(self) -> int:
        return min(self.num_added, len(self._rows))

    def add(self, row: tuple[Any, ...]) -> None:
        self._rows[self.num_added % len(self._rows)] = row
        self.num_added += 1

    def extend(self, rows: StructArray) -> None:
        """Adds rows in their order; of more than there is room for, the newest stay."""
        size, begin = len(self._rows), self.num_added
        self.num_added += len(rows)
        begin, rows = max(begin, self.num_added - size), rows[-size:]
        at = begin % size
        until_end = size - at
        self._rows[at : at + len(rows)] = rows[:until_end]
        if len(rows) > until_end:
            self._rows[: len(rows) - until_end] = rows[until_end:]

    def newest(self, num_rows: int | None = None) -> StructArray:
        """Returns a copy of a number of rows, or of all there are, oldest first."""
        count = len(self) if num_rows is None else min(num_rows, len(self))
        size = len(self._rows)
        start, stop = (self.num_added - count) % size, self.num_added % size
        if start < stop or not count:
            return self._rows[start : start + count].copy()
        return np.concatenate((self._rows[start:], self._rows[:stop]))

    def since(self, field: str, value: int) -> StructArray:
        """Returns a copy of the rows from the first on whose `field` is greater; the field must grow with the rows."""
        size, column = len(self._rows), self._rows[field]
        held = range(self.num_added - len(self), self.num_added)
        return self.newest(len(held) - bisect_right(held, value, key=lambda place: column[place % size]))


def _since(begin_ns: int, ended: Sequence[_Ended]) -> Iterator[bytes]:
    """Yields the records of requests that ended no earlier.

    All are looked at: a request whose client left comes behind others that ended after it, when the engine let it go.
    """
    return (content for end_ns, _, content in ended if end_ns >= begin_ns)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of what the recorder remembers; becoming a recording costs it milliseconds, so not on the event loop."""

    rows: Recording  # whose requests are those in flight
    finished: list[bytes]

    def recording(self) -> Recording:
        """Makes the recording; may be called in any thread."""
        requests = [*map(_decode, self.finished), *self.rows.requests]
        return replace(
            self.rows,
            requests=sorted(requests, key=lambda request: request.serial),
            interruptions=np.sort(self.rows.interruptions, order="start_ns", kind="stable"),
        )


class FlightRecorder(WriteObserver):
    """The observer that remembers the last steps, writes and requests."""

    def __init__(self, config: Config, version: str, clock: Callable[[], int] = time.monotonic_ns) -> None:
        observe = config.observe
        num_requests = observe.recorder_steps // STEPS_PER_REQUEST
        self.config = config
        self.engine_info: EngineInfo | None = None
        self.last_step: StepRecord | None = None
        self._version = version
        self._clock = clock
        self._in_flight: dict[str, RequestTimeline] = {}
        # Finished ones as msgpack: a tenth of the memory, and nothing that a garbage collection would walk through.
        self._finished: deque[_Ended] = deque(maxlen=num_requests)
        # Apart, so that a flood of them pushes out none that had tokens.
        self._rejected: deque[_Ended] = deque(maxlen=-(-num_requests // _REJECTED_DIVISOR))
        self._steps = Ring(STEP_DTYPE, observe.recorder_steps)
        self._writes = Ring(WRITE_DTYPE, WRITES_PER_STEP * observe.recorder_steps)
        self._new_writes: list[dict[str, Column]] = []  # not yet in the ring
        self._interruptions = Ring(INTERRUPTION_DTYPE, NUM_INTERRUPTIONS)
        self._interrupted: deque[tuple[int, int, int]] = deque(maxlen=NUM_INTERRUPTIONS)  # not yet in the ring

    # --- facts ------------------------------------------------------------------------------------------------------

    def note_interruption(self, cause: Cause, start_ns: int, end_ns: int) -> None:
        """Notes that the front end did something else. May be called in any thread, also by the garbage collector."""
        self._interrupted.append((start_ns, end_ns, cause.number))

    def on_start(self, timeline: RequestTimeline) -> None:
        self._in_flight[timeline.request_id] = timeline

    def on_step(self, record: StepRecord, advanced: Advanced) -> None:  # noqa: ARG002
        self.last_step = record
        self._steps.add(step_row(record))
        if self._interrupted:
            self._store_interruptions()

    def on_writes(self, writes: Writes) -> None:
        self._new_writes.append(writes.columns())
        if len(self._new_writes) >= _MANY_PIECES:
            self._store_writes()

    def on_finish(self, timeline: RequestTimeline) -> None:
        del self._in_flight[timeline.request_id]
        ended = self._rejected if timeline.finish_reason is FinishReason.REJECTED else self._finished
        ended.append((timeline.end_ns, timeline.request_id, _encode(RequestRecord.of(timeline))))

    def on_resume(self, timelines: Sequence[RequestTimeline]) -> None:
        self._in_flight = {timeline.request_id: timeline for timeline in timelines}

    def _store_writes(self) -> None:
        pieces, self._new_writes = self._new_writes, []
        if pieces:
            rows = np.empty(sum(len(columns["serial"]) for columns in pieces), WRITE_DTYPE)
            for name in WRITE_DTYPE.names or ():
                rows[name] = np.concatenate([columns[name] for columns in pieces])
            self._writes.extend(rows)

    def _store_interruptions(self) -> None:
        while self._interrupted:
            self._interruptions.add(self._interrupted.popleft())

    # --- what is remembered -----------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> list[RequestTimeline]:
        """The requests that have not ended, in the order of arrival."""
        return list(self._in_flight.values())

    @property
    def clock_pair(self) -> ClockPair:
        return ClockPair(self._clock(), time.time_ns())

    def find(self, request_id: str) -> RequestRecord | None:
        """Returns the request in flight, or else the one that ended last under this id."""
        if found := self._in_flight.get(request_id):
            return RequestRecord.of(found)
        newest = (
            next((ended for ended in reversed(kind) if ended[1] == request_id), None)
            for kind in (self._finished, self._rejected)
        )
        found_ended = max((ended for ended in newest if ended is not None), default=None)
        return None if found_ended is None else _decode(found_ended[2])

    def writes_of(self, serial: int) -> StructArray:
        """Returns the writes of one request that are still remembered."""
        self._store_writes()
        writes = self._writes.newest()
        found: StructArray = writes[writes["serial"] == serial]
        return found

    def snapshot(self, num_steps: int | None = None, trigger: str = "") -> Snapshot:
        """Returns a copy of everything since the first of the newest `num_steps` steps, or of all there is.

        A request counts when it ended later than that step began, or has not ended.
        """
        steps = self._steps.newest(num_steps)
        return self._snapshot(steps, 0 if num_steps is None or not len(steps) else int(steps["start_ns"][0]), trigger)

    def snapshot_since(self, begin_ns: int) -> Snapshot:
        """Returns a copy of what ended later than a moment of the monotonic clock."""
        taken = self._snapshot(self._steps.since("end_ns", begin_ns), begin_ns, trigger="")
        has_older = len(taken.rows.writes) < len(self._writes)  # so that all since then are there
        num_forgotten = 0 if has_older else taken.rows.meta.num_forgotten_writes
        meta = msgspec.structs.replace(taken.rows.meta, begin_ns=begin_ns, num_forgotten_writes=num_forgotten)
        return replace(taken, rows=replace(taken.rows, meta=meta))

    def _snapshot(self, steps: StructArray, begin_ns: int, trigger: str) -> Snapshot:
        self._store_interruptions()
        self._store_writes()
        interruptions, writes = self._interruptions.newest(), self._writes.since("written_ns", begin_ns)
        meta = RecordingMeta(
            version=self._version,
            model_name=self.config.served_model_name,
            clock=self.clock_pair,
            engine=self.engine_info,
            config={name: msgspec.to_builtins(getattr(self.config, name)) for name in _SECTIONS}
            | {"observe": {name: getattr(self.config.observe, name) for name in _OF_GAPS}},
            trigger=trigger,
            num_forgotten_writes=self._writes.num_added - len(writes),
        )
        rows = Recording(
            meta=meta,
            requests=[RequestRecord.of(timeline) for timeline in self._in_flight.values()],
            steps=steps,
            writes=writes,
            interruptions=interruptions[interruptions["end_ns"] > begin_ns],
        )
        return Snapshot(rows, [*_since(begin_ns, self._finished), *_since(begin_ns, self._rejected)])
