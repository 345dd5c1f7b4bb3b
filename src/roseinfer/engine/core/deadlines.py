"""Sequences with a time limit into those whose time is up. Knows when, not what happens to them then."""

from heapq import heapify, heappop, heappush
from weakref import ref

from roseinfer.engine.core.sequence import Sequence, SequenceStatus

_NEVER = 1 << 63
MIN_SWEPT = 256  # entries below which nobody looks for those of ended sequences

_Entry = tuple[int, int, ref[Sequence], bool]  # moment, serial number, whose, whether only before a first batch


class Deadlines:
    """A heap, of which a step looks at the first entry and, as a rule, at no other.

    Entries of sequences that have ended stay until their time, unless they become the larger part: so there are
    never more than four times the most sequences that were unfinished at once, and a constant. The sequences go at
    once, for prompts and grammars are large and a client's time limit may be a day.
    """

    def __init__(self) -> None:
        self.next_ns = _NEVER  # nothing happens before
        self.limit = MIN_SWEPT  # of entries, ever
        self._heap: list[_Entry] = []
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence, num_unfinished: int) -> None:
        """Watch the sequence's deadlines, if it has any; `num_unfinished` sequences are under way."""
        request = sequence.request
        for moment_ns, is_of_queue in ((request.deadline_ns, False), (request.queue_deadline_ns, True)):
            if moment_ns is not None:
                self._num_added += 1
                heappush(self._heap, (moment_ns, self._num_added, ref(sequence), is_of_queue))
        self.limit = max(self.limit, MIN_SWEPT + 4 * num_unfinished)
        if len(self._heap) > MIN_SWEPT + 4 * num_unfinished:
            self._heap = [entry for entry in self._heap if _waiting_for(entry) is not None]
            heapify(self._heap)
        self._look()

    def take_expired(self, now_ns: int) -> list[Sequence]:
        """Unfinished sequences whose time is up, each once."""
        expired: dict[Sequence, None] = {}
        while self._heap and self._heap[0][0] <= now_ns:
            if (sequence := _waiting_for(heappop(self._heap))) is not None:
                expired[sequence] = None
        self._look()
        return list(expired)

    def _look(self) -> None:
        self.next_ns = self._heap[0][0] if self._heap else _NEVER


def _waiting_for(entry: _Entry) -> Sequence | None:
    """Its sequence, if it is unfinished and not on its last token; a queue's limit is over with the first batch."""
    _, _, reference, is_of_queue = entry
    sequence = reference()
    if sequence is None or sequence.status in {SequenceStatus.ENDING, SequenceStatus.FINISHED}:
        return None
    return None if is_of_queue and sequence.scheduled_ns else sequence
