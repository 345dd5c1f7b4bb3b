"""Finds the sequences whose time limit has passed."""

from heapq import heapify, heappop, heappush
from weakref import ref

from roseinfer.engine.core.sequence import Sequence, SequenceStatus

_NEVER = 1 << 63
MIN_SWEPT = 256  # below this number of entries, those of ended sequences are left where they are

_Entry = tuple[int, int, ref[Sequence], bool]  # moment, serial number, sequence, whether it ends with the first batch


class Deadlines:
    """A heap of deadlines; most steps look at its first entry only.

    Entries of sequences that have ended stay until their moment, or until they are the larger part: there are never
    more than a constant plus four times the most sequences that were unfinished at once. The sequences themselves are
    freed at once, since prompts and grammars are large and a client's time limit may be a day.
    """

    def __init__(self) -> None:
        self.next_ns = _NEVER  # nothing expires before this moment
        self.limit = MIN_SWEPT  # of entries, ever
        self._heap: list[_Entry] = []
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add_sequence(self, sequence: Sequence, num_unfinished: int) -> None:
        """Watch the sequence's deadlines, if it has any; `num_unfinished` sequences are in the engine."""
        request = sequence.request
        for moment_ns, is_of_queue in ((request.deadline_ns, False), (request.queue_deadline_ns, True)):
            if moment_ns is not None:
                self._num_added += 1
                heappush(self._heap, (moment_ns, self._num_added, ref(sequence), is_of_queue))
        limit = MIN_SWEPT + 4 * num_unfinished
        self.limit = max(self.limit, limit)
        if len(self._heap) > limit:
            self._heap = [entry for entry in self._heap if _sequence_of(entry) is not None]
            heapify(self._heap)
        self._update_next()

    def pop_expired(self, now_ns: int) -> list[Sequence]:
        """Remove and return the unfinished sequences whose time is up, each once."""
        expired: dict[Sequence, None] = {}
        while self._heap and self._heap[0][0] <= now_ns:
            if (sequence := _sequence_of(heappop(self._heap))) is not None:
                expired[sequence] = None
        self._update_next()
        return list(expired)

    def _update_next(self) -> None:
        self.next_ns = self._heap[0][0] if self._heap else _NEVER


def _sequence_of(entry: _Entry) -> Sequence | None:
    """The entry's sequence, unless it has ended or is at its last token, or the entry's queue limit is past."""
    _, _, reference, is_of_queue = entry
    sequence = reference()
    if sequence is None or sequence.status in {SequenceStatus.ENDING, SequenceStatus.FINISHED}:
        return None
    return None if is_of_queue and sequence.scheduled_ns else sequence
