"""Sequences with a time limit into those whose time is up. Knows when, not what happens to them then."""

from heapq import heapify, heappop, heappush

from roseinfer.engine.sequence import Sequence, SequenceStatus

_NEVER = 1 << 63
MIN_SWEPT = 256  # entries below which nobody looks for those of ended sequences

_Entry = tuple[int, int, Sequence, bool]  # moment, serial number, whose, whether it only counts before a first batch


class Deadlines:
    """A heap, of which a step looks at the first entry and, as a rule, at no other.

    Entries of sequences that have ended stay until their time, unless they become the larger part: so there are
    never more than four times the most sequences that were unfinished at once, and a constant.
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
                heappush(self._heap, (moment_ns, self._num_added, sequence, is_of_queue))
        self.limit = max(self.limit, MIN_SWEPT + 4 * num_unfinished)
        if len(self._heap) > MIN_SWEPT + 4 * num_unfinished:
            self._heap = [entry for entry in self._heap if _counts(entry)]
            heapify(self._heap)
        self._look()

    def take_expired(self, now_ns: int) -> list[Sequence]:
        """Unfinished sequences whose time is up, each once."""
        expired: dict[int, Sequence] = {}
        while self._heap and self._heap[0][0] <= now_ns:
            entry = heappop(self._heap)
            if _counts(entry):
                expired[id(entry[2])] = entry[2]
        self._look()
        return list(expired.values())

    def _look(self) -> None:
        self.next_ns = self._heap[0][0] if self._heap else _NEVER


def _counts(entry: _Entry) -> bool:
    """Its sequence is unfinished, and not on its last token; a queue's limit is over with the first batch."""
    _, _, sequence, is_of_queue = entry
    if sequence.status in {SequenceStatus.ENDING, SequenceStatus.FINISHED}:
        return False
    return not (is_of_queue and sequence.scheduled_ns)
