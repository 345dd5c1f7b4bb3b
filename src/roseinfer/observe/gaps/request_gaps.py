"""Finds the gaps between the tokens of each request of a recording, and their causes; `attribution.py` does it live.

An engine gap lies between two tokens of a request, known on the host. A wire gap lies between two socket writes of a
stream: its moments before the token was known that made the second write due are those of engine gaps, later ones are
stages of that token's way to the socket. So parts always add up to their gap.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from roseinfer.observe.gaps.causes import CAUSES, Cause
from roseinfer.observe.gaps.deliveries import delivery_segments
from roseinfer.observe.gaps.interruptions import RecordedInterruptions
from roseinfer.observe.gaps.step_gaps import GapSplitter, Segments, StepGaps, parts_of
from roseinfer.observe.recorder.recording import Recording, RequestRecord, step_of
from roseinfer.records import Arrival, Delivery

Clock = Literal["engine", "wire"]

SLOW_FACTOR = 3.0
SLOW_MIN_NS = 2_000_000

NUM_USUAL = 256  # gaps that say what is usual
_MEDIAN_EVERY = 64  # gaps at most; the first ones, each


class Gap(msgspec.Struct, frozen=True, gc=False):
    """One gap between two tokens, or writes, of a request."""

    serial: int  # of the request
    index: int  # of the token, or of the write, that ended it
    start_ns: int
    end_ns: int
    step_id: int  # that made the token
    parts: dict[Cause, int]  # nanoseconds; they add up to the gap
    cause: Cause  # of a slow one the part the furthest above what is usual, else the largest part
    is_slow: bool

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


class Usual:
    """The median of recent gaps, and what their parts usually are."""

    def __init__(self, slow_factor: float, slow_min_ns: int) -> None:
        self._factor = slow_factor
        self._min_ns = slow_min_ns
        self._gaps: npt.NDArray[np.int64] = np.zeros(NUM_USUAL, np.int64)  # a ring
        self.num_seen = 0
        self._median_at = 1  # seen, when the median is next found
        self._num_lessons = 0  # from which the usual parts are known
        self._parts: dict[Cause, float] = {}
        self.threshold_ns: float = float("inf")  # beyond it a gap is slow

    def is_slow(self, gap_ns: int) -> bool:
        return gap_ns > self.threshold_ns

    def learn_gap(self, gap_ns: int, segments: Segments) -> None:
        """Learns from one more gap."""
        self._gaps[self.num_seen % NUM_USUAL] = gap_ns
        self._count(1)
        if segments and not self.is_slow(gap_ns):
            self._num_lessons += 1
            parts = parts_of(segments)
            for cause in {*self._parts, *parts}:
                usual = self._parts.get(cause, 0.0)
                self._parts[cause] = usual + (parts.get(cause, 0) - usual) / min(self._num_lessons, 32)

    def learn_durations(self, gaps_ns: npt.NDArray[np.int64]) -> None:
        """Learns the lengths of gaps, and not their parts."""
        newest, end = gaps_ns[-NUM_USUAL:], self.num_seen + len(gaps_ns)
        self._gaps[np.arange(end - len(newest), end) % NUM_USUAL] = newest
        self._count(len(gaps_ns))

    def _count(self, num_gaps: int) -> None:
        """Counts gaps put into the ring; now and then finds the median anew."""
        self.num_seen += num_gaps
        if self.num_seen >= self._median_at:
            self._median_at = self.num_seen + min(1 + self.num_seen // 16, _MEDIAN_EVERY)
            ordered = np.sort(self._gaps[: self.num_seen])  # np.median takes four times as long
            median_ns = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
            self.threshold_ns = max(self._factor * float(median_ns), self._min_ns)

    def gap(self, serial: int, index: int, start_ns: int, end_ns: int, step_id: int, segments: Segments) -> Gap:
        """Returns a gap, with its cause: if it is slow, the one whose part is the furthest above what it usually is.

        A gap that is not slow may be above what is usual by next to nothing, in a part that is next to nothing.
        """
        parts = parts_of(segments)
        is_slow = self.is_slow(end_ns - start_ns)
        usual = self._parts if is_slow else {}
        dominant = max(parts, key=lambda cause: parts[cause] - usual.get(cause, 0.0), default=Cause.UNKNOWN)
        return Gap(serial, index, start_ns, end_ns, step_id, parts, dominant, is_slow)


def gaps_of(recording: Recording, clock: Clock = "wire") -> list[Gap]:
    """Returns every gap whose steps are in the recording, in the order of their ends.

    By the clock `wire`, streamed requests have the gaps between their writes; the others have those between tokens.
    """
    return [gap for gap, _ in split_gaps(recording, clock)]


def split_gaps(recording: Recording, clock: Clock = "wire") -> Iterator[tuple[Gap, Segments]]:
    """Yields the gaps of `gaps_of`, and of each what its moments went to, in the order of time.

    Which of them are slow is decided as the recorded server did.
    """
    observe = recording.meta.config.get("observe", {})
    slow_factor = float(observe.get("slow_gap_factor", SLOW_FACTOR))
    slow_min_ns = int(observe.get("slow_gap_min_ms", SLOW_MIN_NS / 1e6) * 1e6)
    reader = _Reader(recording)
    pieces: list[_Piece] = []
    for request in recording.requests:
        is_wire = clock == "wire" and request.is_streamed
        pieces += reader.wire_gaps(request) if is_wire else reader.engine_gaps(request)
    pieces.sort(key=lambda piece: piece.end_ns)
    usuals = {is_wire: Usual(slow_factor, slow_min_ns) for is_wire in (False, True)}
    for piece in pieces:
        usual = usuals[piece.is_wire]
        yield usual.gap(*piece[1:]), piece.segments
        usual.learn_gap(piece.end_ns - piece.start_ns, piece.segments)


class _Piece(NamedTuple):
    is_wire: bool
    serial: int
    number: int
    start_ns: int
    end_ns: int
    step_id: int
    segments: Segments


class _Reader:
    """The gaps of a recording, request by request."""

    def __init__(self, recording: Recording) -> None:
        engine = recording.meta.engine
        splitter = GapSplitter(has_graphs=bool(engine and engine.decode_graph_sizes))
        steps = [step_of(row) for row in recording.steps]
        sending = {
            step.tokens_ns: (step.late_gc_ns, step.outbox_depth > 0, step.late_throttled_ns, step.late_wait_ns)
            for step in steps
        }
        taken = [splitter.split_step(step) for step in steps]
        self._steps = StepGaps([gap for gap in taken if gap is not None])
        self._interruptions = RecordedInterruptions(
            (int(row["start_ns"]), int(row["end_ns"]), CAUSES[int(row["cause"])]) for row in recording.interruptions
        )
        self._deliveries: dict[int, list[Delivery]] = defaultdict(list)
        for serial, tokens, sent, read, resumed, encoded, written, was_paused in recording.writes.tolist():
            arrival = Arrival(tokens, sent, read, *sending.get(tokens, ()))
            deliveries = self._deliveries[serial]
            deliveries.append(Delivery(arrival, resumed, encoded, written, was_paused, len(deliveries)))

    def engine_gaps(self, request: RequestRecord) -> Iterable[_Piece]:
        for index, (start_ns, end_ns) in enumerate(pairwise(request.token_ns), 1):
            segments, gap = self._steps.between(request, index), self._steps.ended_at(end_ns)
            if segments is not None and gap is not None:
                yield _Piece(False, request.serial, index, start_ns, end_ns, gap.step_id, segments)

    def wire_gaps(self, request: RequestRecord) -> Iterable[_Piece]:
        for index, (before, delivery) in enumerate(pairwise(self._deliveries[request.serial]), 1):
            start_ns, tokens_ns = before.written_ns, delivery.arrival.tokens_ns
            gap = self._steps.ended_at(tokens_ns)
            waited = self._steps.since(request, start_ns, tokens_ns)
            if gap is not None and waited is not None:
                segments = (*waited, *delivery_segments(delivery, start_ns, self._interruptions))
                yield _Piece(True, request.serial, index, start_ns, delivery.written_ns, gap.step_id, segments)
